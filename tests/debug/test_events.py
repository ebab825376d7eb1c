"""What conditions can use of a step and a node is what the record holds."""

import pytest

from specscope.debug.breakpoints import Breakpoints, EventKind, events
from specscope.engine.engine import Engine
from specscope.live.local import commands_over
from specscope.trace.history.conditions import Expression
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.words import NODE


@pytest.fixture(scope="module")
def history(deep):
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"}
    engine = Engine(target=str(deep), dtype="float32", kv_memory=0.01, **how)
    session = commands_over(engine).session
    for seed in range(6):
        engine.add("abcabcabcab", SamplingParams(temperature=1.5, max_tokens=24, seed=seed, ignore_eos=True))
    session.cont()
    return session.history


def events_of(history, *kinds):
    return [event for record in history.steps for event in events(record, history, frozenset(kinds))]


def test_the_fields_of_a_node_are_those_of_its_record(history):
    found = events_of(history, EventKind.ACCEPT, EventKind.REJECT)
    for event in found:
        part, node, facts = event.evidence.part, event.node, event.evidence
        tree, notes, parent = part.tree, part.parents, int(part.tree.parent[node])
        place = notes.node.tolist().index(parent)
        assert facts["raw_p"] == notes.raw_p[node]
        assert facts["rank"] == notes.rank[node]
        assert facts["entropy"] == notes.entropy[place]
        assert facts["choice_p"] == notes.choice_p[place]
        assert (facts["parent"], facts["siblings"]) == (parent, len(tree.children(parent)))
        assert facts["q_rank"] == notes.q_rank[node] > 0
    assert {event.kind for event in found} == {EventKind.ACCEPT, EventKind.REJECT}


def test_the_fields_of_a_step_tell_what_preceded_it_and_what_it_rejected(history):
    condition = Expression("final in rejected", {name: field.type for name, field in NODE.items()})
    rejections = 0
    for event in events_of(history, EventKind.STEP):
        part, facts = event.evidence.part, event.evidence
        assert (facts["rule"], facts["preceded"]) == ("standard", part.preceded.value)
        before = history.requests[part.request].steps[part.index - 1] if part.index else None
        assert (facts["preceded"] == "prefill") is (before is None)
        assert (facts["preceded"] == "full") is (before is not None and before.verdict.kind is FinalKind.BONUS)
        rejected = int((part.verdict.outcome == Outcome.REJECTED).sum())
        assert len(facts["rejected"]) == rejected
        assert condition(facts) == (part.verdict.token in facts["rejected"])
        rejections += rejected
    assert rejections > 10


def test_every_field_can_stand_in_a_condition():
    points = Breakpoints()
    for name, field in NODE.items():
        kind = field.type
        points.add("reject", f"{name} == 'x'" if kind is str else f"1 in {name}" if kind is tuple else f"{name} == 1")
    assert len(points.points) == len(NODE)
