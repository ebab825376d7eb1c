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


def test_the_fields_of_a_node_are_those_of_its_record(history):
    seen = set()
    for record in history.steps:
        for event in events(record, history, frozenset({EventKind.ACCEPT, EventKind.REJECT})):
            part, node, facts = event.evidence.part, event.node, event.evidence
            tree, notes, parent = part.tree, part.parents, int(part.tree.parent[node])
            place = notes.node.tolist().index(parent)
            assert facts["raw_p"] == notes.raw_p[node]
            assert facts["rank"] == notes.rank[node]
            assert facts["entropy"] == notes.entropy[place]
            assert facts["choice_p"] == notes.choice_p[place]
            assert facts["parent"] == parent
            assert facts["siblings"] == len(tree.children(parent))
            assert facts["q_rank"] == notes.q_rank[node] > 0
            seen.add(event.kind)
    assert seen == {EventKind.ACCEPT, EventKind.REJECT}


def test_the_fields_of_a_step_tell_what_preceded_it(history):
    for record in history.steps:
        for event in events(record, history, frozenset({EventKind.STEP})):
            part, facts = event.evidence.part, event.evidence
            if part.verdict is None:
                continue
            assert (facts["rule"], facts["preceded"]) == ("standard", part.preceded.value)
            if part.index == 0:
                assert facts["preceded"] == "prefill"
                continue
            before = history.requests[part.request].steps[part.index - 1]
            full = before.verdict.kind is FinalKind.BONUS
            assert (facts["preceded"] == "full") == full


def test_a_condition_asks_whether_the_final_token_was_rejected(history):
    condition = Expression("final in rejected", {name: field.type for name, field in NODE.items()})
    rejected = 0
    for record in history.steps:
        for event in events(record, history, frozenset({EventKind.STEP})):
            verdict = event.evidence.part.verdict
            rejected += int((verdict.outcome == Outcome.REJECTED).sum())
            assert len(event.evidence["rejected"]) == int((verdict.outcome == Outcome.REJECTED).sum())
            assert condition(event.evidence) == (verdict.token in event.evidence["rejected"])
    assert rejected > 10


def test_every_field_can_stand_in_a_condition():
    points = Breakpoints()
    for name, field in NODE.items():
        kind = field.type
        points.add("reject", f"{name} == 'x'" if kind is str else f"1 in {name}" if kind is tuple else f"{name} == 1")
    assert len(points.points) == len(NODE)
