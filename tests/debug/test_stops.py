"""Why a run stopped, over an engine and its capture alike, and what conditions can use of a step and a node."""

import pytest

from specscope.debug.answers import BreakpointHit, Stop, StopReason
from specscope.debug.breakpoints import Breakpoints, EventKind, events
from specscope.debug.session import Session
from specscope.debug.show import stop_text, why_text
from specscope.debug.viewer import Viewer
from specscope.live.local import commands_over
from specscope.trace.history.conditions import Expression
from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.words import NODE
from tests.engines import tiny_engine
from tests.trace.samples import records


@pytest.fixture
def history():
    made = History()
    for record in records():
        made.append(record)
    return made


@pytest.fixture
def session(history):
    return Session(history)


def test_each_move_says_why_it_stopped_and_where(session):
    last = session.history.last_step
    assert (session.next(), session.cont()) == (Stop(StopReason.STEP, 0), Stop(StopReason.END, last))
    assert session.cont() == Stop(StopReason.END, last, moved=False)
    assert session.goto(-1) == Stop(StopReason.START, -1)
    assert session.reverse_next() == Stop(StopReason.START, -1)
    assert session.goto_step(last) == Stop(StopReason.STEP, last)
    assert session.reverse_continue() == Stop(StopReason.START, 0)


def test_a_condition_that_holds_and_a_request_that_ends_are_named_and_a_breakpoint_goes_before_them(session):
    stop = session.until("accepted > 0")
    assert (stop.reason, stop.condition) == (StopReason.UNTIL, "accepted > 0")
    part = next(part for part in session.record.requests if part.request == stop.request)
    assert part.verdict.accepted > 0
    session.goto(0)
    ended = next(end.info.id for record in session.history.steps[1:] for end in record.finished)
    stop = session.finish(ended)
    assert (stop.reason, stop.request) == (StopReason.FINISHED, ended)
    assert ended in [end.info.id for end in session.record.finished]
    session.goto(-1)
    session.interrupted = lambda: session.position == 1
    assert session.cont() == Stop(StopReason.INTERRUPTED, 1)
    session.goto(-1)
    session.breakpoints.add("step")
    stop = session.next()
    assert stop.reason is StopReason.BREAKPOINT
    assert {hit.number for hit in stop.hits} == {1}
    assert [hit.step for hit in stop.hits] == [0] * len(stop.hits)


def test_a_watch_stops_where_its_condition_changes_and_nowhere_else(session):
    session.breakpoints.watch("accepted > 0")
    hits = []
    while (stop := session.cont()).reason is StopReason.BREAKPOINT:
        hits += [(hit.step, hit.request) for hit in stop.hits]
    held, changes = set(), []
    for record in session.history.steps:
        for part in record.requests:
            holds = part.verdict is not None and part.verdict.accepted > 0
            changes += [(record.step, part.request)] if holds != (part.request in held) else []
            (held.add if holds else held.discard)(part.request)
    assert hits == changes != []


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (Stop(StopReason.PHASE, 3, phase="draft"), "draft done, of step 3"),
        (Stop(StopReason.UNTIL, 3, request="r1", condition="tau < 2"), "tau < 2 holds for r1"),
        (Stop(StopReason.FINISHED, 3, request="r1"), "r1 has ended"),
        (Stop(StopReason.END, -1, moved=False), "nothing is left to run"),
        (Stop(StopReason.START, 0), "the first step: no breakpoint before"),
        (Stop(StopReason.INTERRUPTED, 3), "interrupted"),
        (
            Stop(StopReason.BREAKPOINT, 3, (BreakpointHit(1, "break reject", 3, "r1", 2),)),
            "breakpoint 1 (break reject) at step 3, r1, node 2",
        ),
    ],
)
def test_the_words(stop, text):
    assert why_text(stop) == text


def test_a_screen_tells_why_and_where_by_its_own_history(session):
    session.breakpoints.add("step")
    stop = session.cont()
    why, where, *_ = stop_text(stop, session.history).splitlines()
    assert why == why_text(stop).splitlines()[0]
    assert len(stop.hits) > 1 or where.startswith("step 0  ")
    unknown = Stop(StopReason.BREAKPOINT, 99, (BreakpointHit(1, "break step", 99, "r1", None),))
    assert stop_text(unknown, session.history) == "breakpoint 1 (break step) at step 99, r1"


def test_goto_start_of_a_screen_searches_the_first_step_too_and_moving_it_moves_the_debugger(history):
    """A screen has no place before the first step, and the debugger has."""
    shown = Viewer(history=history)
    shown.goto_end()
    shown.debug("break step if step == 0")
    shown.debug("continue")
    assert "goto start goes before the first" in shown.news[-1].text
    shown.debug("goto start")
    assert (shown.news[-1].text, shown.position) == ("before the first step", 0)
    shown.debug("continue")
    assert shown.news[-1].text.startswith("breakpoint 1 (break step if step == 0) at step 0")
    shown.debug("goto start")
    shown.goto(1)
    shown.debug("where")
    assert shown.news[-1].text.startswith("step 1")


@pytest.fixture(scope="module")
def run(deep):
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"}
    engine = tiny_engine(deep, **how)
    session = commands_over(engine).session
    for seed in range(6):
        engine.add("abcabcabcab", SamplingParams(temperature=1.5, max_tokens=24, seed=seed, ignore_eos=True))
    session.cont()
    return session.history


def events_of(run, *kinds):
    return [event for record in run.steps for event in events(record, run, frozenset(kinds))]


def test_the_fields_of_a_node_are_those_of_its_record(run):
    found = events_of(run, EventKind.ACCEPT, EventKind.REJECT)
    for event in found:
        part, node, facts = event.evidence.part, event.node, event.evidence
        tree, notes, parent = part.tree, part.parents, int(part.tree.parent[node])
        place = notes.node.tolist().index(parent)
        assert (facts["raw_p"], facts["rank"]) == (notes.raw_p[node], notes.rank[node])
        assert (facts["entropy"], facts["choice_p"]) == (notes.entropy[place], notes.choice_p[place])
        assert (facts["parent"], facts["siblings"]) == (parent, len(tree.children(parent)))
        assert facts["q_rank"] == notes.q_rank[node] > 0
    assert {event.kind for event in found} == {EventKind.ACCEPT, EventKind.REJECT}


def test_the_fields_of_a_step_tell_what_preceded_it_and_what_it_rejected(run):
    condition = Expression("final in rejected", {name: field.type for name, field in NODE.items()})
    rejections = 0
    for event in events_of(run, EventKind.STEP):
        part, facts = event.evidence.part, event.evidence
        assert (facts["rule"], facts["preceded"]) == ("standard", part.preceded.value)
        before = run.requests[part.request].steps[part.index - 1] if part.index else None
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
