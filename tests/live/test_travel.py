"""Random commands: looking changes nothing, and the capture replays to what the engine emitted, branch by branch."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specscope import SamplingParams
from specscope.errors import UserError
from specscope.live.local import commands_over
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.model.runner import decoder_layers
from specscope.trace.history.history import History
from specscope.trace.record.tree import ROOT
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.engines import DRAFTERS, PROMPTS, SMALL, fresh

FORKS = [
    "",
    "seed=5 temperature=1.4",
    "temperature=0",
    "drafter=ngram tree=2x3",
    "drafter=none",
    "tree=2",
    "reject=0",
    "accept=1",
    "token=65",
    "coin=0:0.999",
    "max_tokens=3",
]


class Travel(RuleBasedStateMachine):
    engines = None

    @initialize(name=st.sampled_from(list(DRAFTERS)), blocks=st.sampled_from([SMALL, 30]), greedy=st.booleans())
    def begin(self, name, blocks, greedy):
        self.engine, self.greedy = self.engines[name], greedy
        fresh(self.engine, blocks)
        self.commands = commands_over(self.engine)
        self.session = self.commands.session
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "run.jsonl"
        self.writer = CaptureWriter(self.path, self.engine.run_info, self.engine.vocabulary)
        self.follower = History(self.engine.run_info, self.engine.vocabulary)
        self.published = []
        self.engine.subscribe(self.published.append, lossless=True)
        self.engine.subscribe(self.writer, lossless=True)
        self.engine.bus.subscribe(self.follower.take, lossless=True, moves=True)

    @rule(prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 14), seed=st.integers(0, 9))
    def add(self, prompt, tokens, seed):
        temperature = 0 if self.greedy else 0.8
        self.engine.add(prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed))

    @precondition(lambda self: self.engine.requests)
    @rule(index=st.integers(0, 5))
    def cancel(self, index):
        self.engine.cancel(list(self.engine.requests)[index % len(self.engine.requests)])

    @rule(line=st.sampled_from(["next", "next 3", "step", "step 3", "until accepted > 0", "finish"]))
    def forward(self, line):
        self.obey(line)

    @rule(line=st.sampled_from(["reverse-next", "reverse-next 3", "reverse-continue"]))
    def back(self, line):
        self.obey(line)

    @precondition(lambda self: self.session.history.steps)
    @rule(share=st.floats(0, 1))
    def goto(self, share):
        steps = self.session.history.steps
        self.obey(f"goto {steps[int(share * (len(steps) - 1))].step}")

    @rule(line=st.sampled_from(["break reject", "break bonus", "watch accepted > 0", "delete"]))
    def breakpoint(self, line):
        self.looks(lambda: self.obey(line))

    @rule(share=st.floats(0, 1), of=st.integers(0, 3), node=st.integers(-1, 3))
    def look(self, share, of, node):
        steps = self.session.history.steps
        record = steps[int(share * (len(steps) - 1))] if steps else None
        if record is None or not record.requests:
            return
        part = record.requests[of % len(record.requests)]
        if part.verdict is None or node >= len(part.tree):
            return
        self.looks(lambda: self.view(record, part, None if node < 0 else node))

    def view(self, record, part, node):
        try:
            view = self.commands.what_if.look(self.session, record.step, part.request, node)
        except UserError as error:
            if "too few free KV blocks" not in str(error):
                raise
            return
        assert not [note for note in view.notes if "was judged" in note]
        assert view.token == (part.verdict.token if node is None else part.tree.token[node])
        judged = part.verdict.final_p if node is None else part.verdict.p[node]
        assert view.p.prob == pytest.approx(float(judged), abs=2e-5)
        assert view.computed == (self.engine.last is None or self.engine.last.known is not record)
        if node is not None and part.tree.parent[node] == ROOT and part.notes is not None and view.draft is not None:
            assert view.draft.prob == pytest.approx(float(part.notes.prob[node]), abs=1e-4) or not self.greedy

    @rule(line=st.sampled_from(["tree", "info kv", "info requests", "info step", "where", "node 0", "print tau"]))
    def say(self, line):
        self.looks(lambda: self.obey(line))

    @rule(words=st.sampled_from(FORKS))
    def fork(self, words):
        if self.session.phase == "":
            self.looks(lambda: self.obey(f"fork {words} tokens=6"))

    def obey(self, line):
        try:
            return self.commands.run(line)
        except UserError:
            return ""

    def looks(self, what):
        """What only looks leaves tokens, KV, books, hooks, records and the capture as they are."""
        before = self.state()
        what()
        after = self.state()
        assert before == after

    def state(self):
        engine = self.engine
        engine.bus.flush()
        cache = engine.runner.cache
        held = []
        for request in engine.requests.values():
            slots = torch.from_numpy(request.table.slots(0, request.computed))
            held.append((request.id, list(request.tokens), request.computed, list(request.table.blocks), request.steps))
            held.append([part[:, slots].double().sum().item() for part in [*cache.key, *cache.value]])
        drafter = getattr(engine.drafter, "cache", None)
        states = {name: (s.computed, list(s.table.blocks)) for name, s in getattr(engine.drafter, "states", {}).items()}
        layers = decoder_layers(engine.runner.loaded.model)
        hooks = sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers)
        return (
            held,
            list(cache.pool.refs),
            None if drafter is None else list(drafter.pool.refs),
            states,
            hooks,
            (engine.steps, engine.current and len(engine.current.phases), id(engine.last)),
            [id(record) for record in self.session.history.steps],
            len(self.published),
        )

    @invariant()
    def books(self):
        """No block leaks, none is used twice, and every count of holders is right."""
        pool = self.engine.runner.cache.pool
        tables = [request.table for request in self.engine.requests.values()]
        held = [block for table in tables for block in table.blocks]
        assert len(set(held)) == len(held)
        assert [pool.refs[block] for block in range(pool.blocks)] == [held.count(b) for b in range(pool.blocks)]
        for request in self.engine.requests.values():
            assert request.computed <= len(request.tokens)
            assert len(request.table.blocks) * BLOCK_SIZE >= request.computed
        drafter = getattr(self.engine.drafter, "cache", None)
        if drafter is not None:
            held = [block for state in self.engine.drafter.states.values() for block in state.table.blocks]
            assert drafter.pool.refs == [held.count(block) for block in range(drafter.pool.blocks)]
            assert set(self.engine.drafter.states) <= set(self.engine.requests)

    @invariant()
    def followed(self):
        """Who follows the bus stands where the session stands."""
        self.engine.bus.flush()
        assert self.follower.steps == self.session.history.steps

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.session.breakpoints.delete()
        self.obey("next 200")
        self.engine.close()
        self.writer.close()
        replayed = read_capture(self.path)
        assert replayed.warnings == []
        history = replayed.history
        assert set(history.branches) == set(self.follower.branches)
        assert sorted(record.step for record in self.published) == list(range(len(self.published)))
        ours = self.session.history.steps
        for branch in self.follower.branches:
            for side in (history, self.follower):
                side.show(branch)
            assert history.steps == self.follower.steps
            self.outputs(history)
        self.follower.move(ours[-1].step if ours else -1)
        history.move(ours[-1].step if ours else -1)
        assert history.steps == ours
        self.folder.cleanup()

    def outputs(self, history):
        """What ended has the output of its steps on that branch."""
        for request in history.requests.values():
            if request.end is not None:
                assert request.end.output.tolist() == [token for token, _ in request.output()]


def travel(engines, examples, steps):
    Travel.engines = engines
    Travel.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, phases=[Phase.explicit, Phase.generate]
    )  # shrinking takes minutes; the steps of a failure are printed all the same
    Travel.TestCase().runTest()


def test_looking_changes_nothing_and_the_capture_is_what_happened(engines):
    travel(engines, 8, 25)


@pytest.mark.slow
def test_two_thousand_commands(engines):
    """Issue 12, shown 2."""
    travel(engines, 50, 40)
