"""The debugger as it is typed: the same over a live engine and over its capture; breakpoints, and events in a step."""

import dataclasses
import re
from contextlib import nullcontext

import pytest

from specscope import SamplingParams
from specscope.debug.answers import BreakpointHit, Stop, StopReason
from specscope.debug.breakpoints import Breakpoints, EventKind, events
from specscope.debug.command_table import COMMANDS, find
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.debug.show import stop_text, why_text
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.live.local import commands_over
from specscope.trace.history.conditions import Expression
from specscope.trace.history.history import History
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.words import NODE, StepFacts
from tests.engines import tiny_engine
from tests.trace.samples import records

HOW = {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"}


def live(tiny, **more):
    engine = tiny_engine(tiny, kv_memory=0.02, **{**HOW, **more})
    commands = commands_over(engine)
    for seed, prompt in enumerate(["abcabcab", "the cat sat on the", "x y x y"]):
        engine.add(prompt, SamplingParams(max_tokens=14, temperature=0.8, seed=seed, ignore_eos=True))
    return commands


@pytest.fixture(scope="module")
def recorded(tiny):
    """The history of a whole run."""
    commands = live(tiny)
    commands.run("continue")
    return commands.session.history


@pytest.fixture
def engine(tiny):
    return live(tiny)


def over(recorded, position=-1):
    history = History(run=recorded.run, vocabulary=recorded.vocabulary)
    for record in recorded.steps:
        history.append(record)
    return Commands(Session(history=history, position=position))


@pytest.fixture
def capture(recorded):
    """The debugger over the recording, which says what it says over the engine (below)."""
    return over(recorded)


SCRIPT = [
    "break reject if depth == 1 and p < 0.2",
    "break bonus",
    "watch accepted > 0",
    "info breakpoints",
    "continue",
    "where",
    "tree",
    "print p_tried @ 0",
    "continue",
    "next 2",
    "reverse-next",
    "goto 4",
    "info step",
    "delete",
    "until committed > 1",
    "break recover",
    "next 20",
    "next 2",
    "reverse-continue",
    "reverse-continue",
    "goto 2",
    "delete",
    "finish r1",
    "info kv",
    "info drafter",
    "goto r2@3",
    "request r0",
    "why",
    'break step if request == "r2"',
    "continue",
    "node 0",
    "clear step",
    "goto start",
]


def test_live_and_over_a_capture_everything_reads_the_same(engine, capture):
    """Times aside; what a step wrote into the KV cache and moved is in its record."""
    for line in SCRIPT:
        said = [commands.run(line) for commands in (engine, capture)]
        if line == "node 0":  # the engine has whole distributions as well
            assert said[0].splitlines()[:2] == said[1].splitlines()[:2]
        elif line == "info kv":
            steps = [[line for line in lines.splitlines() if "rows fed" in line] for lines in said]
            assert steps[0] == steps[1] != []
            assert all("slots" in line for line in steps[0])
        elif line != "info step":
            assert said[0] == said[1], line


def test_the_end_of_an_engine_that_went_back_is_the_last_step_that_it_reached(engine):
    engine.run("next 6")
    reached = engine.run("where")
    engine.run("reverse-next 3")
    engine.run("goto end")
    assert engine.run("where") == reached


def test_phases_one_by_one(engine):
    engine.run("next 3")
    assert "schedule done, of step 3" in engine.run("step")
    assert "nodes drafted" in engine.run("step")
    assert "logits of" in engine.run("")  # an empty line repeats
    assert engine.session.phase == "forward"
    assert engine.run("tree").startswith("of step 2; a step is in progress")
    engine.run("step 2")
    assert (engine.session.record.step, engine.session.phase) == (3, "")


def test_a_node_shows_distributions_and_the_same_verdict(engine):
    engine.run("b reject")
    engine.run("c")
    node = engine.session.breakpoints.check(engine.session.record, engine.session.history).hits[0].node
    said = engine.run(f"node {node}")
    for part in (
        "target, raw",
        "target, as sampled",
        "KL(target‖drafter)",
        "target, as sampled: the drafted token 0.",
        "context: …",
        "of the target's mass is left",
    ):
        assert part in said
    assert "ANOTHER" not in said


def test_info_kv_tells_what_a_step_wrote_moved_and_left(engine):
    engine.run("b reject if depth == 2")
    engine.run("c")
    part = engine.session.part
    base = part.context_len + part.prefill_tokens + 1
    accepted, nodes = part.verdict.accepted, len(part.tree)
    (line,) = [x for x in engine.run("info kv").splitlines() if x.startswith(f"{part.request}@{part.index}:")]
    slots = engine.session.engine.requests[part.request].table.slots(part.context_len, base + nodes)
    assert (
        f"{base + nodes - part.context_len} rows fed after a context of {part.context_len}, slots {slots[0]} " in line
    )
    assert f"{slots[-1]}" in line
    assert f"; {accepted} of {nodes} nodes kept" in line
    first = base - part.context_len
    for i, node in enumerate(part.verdict.path.tolist()):
        assert (f"{slots[first + node]} to {slots[first + i]}" in line.partition("moved slot")[2]) == (node != i)


def test_a_chosen_request_stays_where_a_step_stops_for_it_too(capture):
    """A breakpoint is of all requests: one that was not hit gives way to one that was."""
    capture.run("break step")
    capture.run("continue")
    for name in [part.request for part in capture.session.record.requests]:
        capture.run(f"request {name}")
        assert f"step {capture.session.record.step + 1}, {name}" in capture.run("continue")
        assert capture.session.current_request.id == name
    capture.run("delete")
    capture.run('break step if request == "r0"')
    capture.run("request r2")
    capture.run("continue")
    assert capture.session.current_request.id == "r0"
    session = capture.session
    capture.run("goto end")
    gone = next(each.id for each in session.history.requests.values() if each.engine_steps[-1] < session.position)
    capture.run(f"request {gone}")
    assert f"without {gone}, whose last step was step {session.part_record.step}" in capture.run("where")
    assert capture.run("print step") == str(session.part_record.step) != str(session.record.step)


FORKS = {
    "seed=99 temperature=1.5": "seed=99",
    "drafter=ngram tree=2x3": "drafter=ngram",
    "tree=3": "tree=3",
    "reject=0": "not lossless",
    "accept=1": "not lossless",
    "token=65": "not lossless",
    "coin=0:0.999": "coin of node 0",
}


def test_forks_say_what_changed_and_leave_the_engine_whole(engine):
    engine.run("next 4")
    pool = engine.session.engine.runner.cache.pool
    held = pool.used
    for words, part in FORKS.items():
        assert part in engine.run(f"fork {words} tokens=8")
        assert pool.used == held
    engine.run("continue")
    assert pool.used == 0
    session = engine.session
    gone = set(session.history.requests) - {part.request for part in session.record.requests}
    engine.run(f"request {gone.pop()}")
    assert "use goto to reach one of its steps" in engine.run("node 0")
    assert session.engine.current is None
    assert [record.step for record in session.history.steps] == list(range(len(session.history.steps)))


REFUSED = [
    ("frobnicate", "unknown command"),
    ("re", "is ambiguous"),
    ("break nothing", "unknown event"),
    ("break reject depth==1", "write break reject if depth==1"),
    ("break reject if", "write break reject if EXPR"),
    ("break reject if(depth = 1)", "invalid condition"),
    ("break reject if depth = 1", "write =="),
    ("break emit if 34 in final", "a number in a number never holds"),
    ('break reject if depth == "x"', "a number beside text never holds"),
    ("goto r99", "there is no request 'r99'"),
    ("break finish if depth == 1", "there is no field depth here"),
    ("delete 9", "there is no breakpoint 9"),
    ("clear reject", "there is no breakpoint at reject"),
    ("clear nothing", "unknown event"),
    ("commands 4", "commands was removed: type the lines after the stop"),
    ("next many", "COUNT must be"),
    ("goto x", "give a step"),
    ("info everything", "give one of: info"),
    ("request r99", "there is no request"),
    ("node 99", "there is no node 99"),
    ("watch", "give a condition"),
    ("fork foo=1", "a fork cannot change '?foo'?: write NAME=VALUE, .*help fork lists"),
    ("fork temperature=hot", "give a number"),
    ("fork 'x", "unbalanced quotes"),
    ("fork seed=inf", "seed=inf"),
    ("fork drafter=magic", "unknown drafter"),
    ("fork accept=77", "there is no node 77"),
    ("fork accept=0 reject=0", "outcome of node 0.* is given twice"),
    ("fork temperature=0.3 temperature=0.9", "temperature.* is given twice"),
    ("fork coin=0:0", "coin"),
    ("fork max_tokens=1", "output tokens? before this step"),
    ("fork coin=0.9", "coin=0.9.?: write coin=NODE:COIN, such as coin=0:0.5"),
    ("finish r99", "there is no request"),
    ("until speed > 3", "there is no field speed here"),
]


def test_what_cannot_be_obeyed_is_said_and_changes_nothing(engine):
    engine.run("next 3")
    before = engine.run("where")
    for line, why in REFUSED:
        with pytest.raises(UserError, match=why):
            engine.run(line)
        assert engine.run("where") == before, line
    engine.run("next")


def test_names_prefixes_help_and_completion():
    for short, name in {"b": "break", "c": "continue", "n": "next", "s": "step", "fin": "finish", "u": "until"}.items():
        assert find(short).name == name
    for short, name in {"p": "print", "i": "info", "rn": "reverse-next", "cont": "continue", "wat": "watch"}.items():
        assert find(short).name == name
    commands = Commands(Session())
    said = " ".join(commands.run("help").split())  # long help goes on below
    assert all(f"{command.head} {command.help}" in said for command in COMMANDS)
    assert "reverse-continue, rc go back" in said
    assert "back one engine step" in commands.run("help rn")
    assert max(map(len, commands.run("help").splitlines())) < 80
    said = commands.run("help fork")
    numbers = [f.name for f in dataclasses.fields(SamplingParams) if type(f.default) in (int, float)]
    changes = ["drafter", "draft_model", "tree", "accept", "reject", "coin", "token", "tokens"]
    assert [name for name in (*numbers, *changes) if not re.search(rf"\b{name}\b", said)] == []
    assert all(usage in commands.run("help info") for usage in find("info").usage.split("|"))
    assert commands.complete("reverse-") == ["reverse-continue", "reverse-next"]
    assert "reject" in commands.complete("break re")
    assert commands.complete("break reject if dep") == ["depth"]


def test_an_empty_session_says_so():
    commands = Commands(Session())
    assert "before the first step" in commands.run("where")
    assert "nothing is left" in commands.run("c")
    with pytest.raises(UserError, match="nothing has run yet"):
        commands.run("print step")


def test_breakpoints_are_deleted_by_number_or_by_their_event_as_in_gdb(capture):
    for line in ("break reject", "break accept", "break reject if p > 0.5", "watch accepted > 0"):
        capture.run(line)
    capture.run("break step")
    assert capture.run("clear reject").splitlines() == [
        "deleted breakpoint 1: break reject",
        "deleted breakpoint 3: break reject if p > 0.5",
    ]
    with pytest.raises(UserError, match="no breakpoint 1"):
        capture.run("delete 2 1")
    assert list(capture.session.breakpoints.points) == [2, 4, 5]
    assert capture.run("clear step") == "deleted breakpoint 5: break step"  # and no watch
    assert capture.run("d 2") == "deleted breakpoint 2: break accept"
    assert capture.run("clear") == "deleted breakpoint 4: watch accepted > 0"
    assert capture.run("info breakpoints") == "no breakpoints"


def test_at_temperature_0_there_is_a_choice_and_no_coin(tiny):
    engine = tiny_engine(tiny, kv_memory=0.02, evidence="lean", **HOW)
    commands = commands_over(engine)
    engine.add("abcabcab", SamplingParams(max_tokens=24, ignore_eos=True))
    commands.run("break reject if kind == 'recovered' and p_tried == 0")
    stop = commands.run("continue")
    token = commands.session.history.vocabulary.show(commands.session.part.verdict.token)
    assert f"rejected: greedy decoding takes the target's top token, ‘{token}’" in stop
    (record,) = commands.session.history.steps[-1:]  # as another engine's record has it: no coin was tossed
    (part,) = record.requests
    verdict = dataclasses.replace(part.verdict, coin=part.verdict.coin * 0, final_coin=0.0)
    record = dataclasses.replace(record, requests=(dataclasses.replace(part, verdict=verdict),))
    commands.session.history.replace_last(record)
    assert [commands.run(f"print {name}") for name in ("u @ 0", "final_coin", "u < 1 @ 0")] == ["None", "None", "None"]


def test_a_breakpoint_stops_at_its_node_which_is_the_current_one_then(capture):
    capture.run("b reject if depth==1")
    said = capture.run("c")
    assert "breakpoint 1 (break reject if depth==1) at step" in said
    assert "rejected: coin 0." in said
    assert "≥ a = min(1, p / q) = min(1, 0." in said
    node = capture.session.node
    assert node is not None
    assert capture.session.breakpoints.points[1].hits >= 1
    assert capture.run("print p") == capture.run(f"print p @ {node}")
    said, where = capture.run("node").splitlines(), capture.run("where").splitlines()[1]
    assert said[0] == f"node {node} at depth 1"
    assert said[2] == where[where.index("rejected") :].capitalize() + "."
    capture.run("delete")
    capture.run("next")
    assert capture.session.node is None
    with pytest.raises(UserError, match="no current node"):
        capture.run("node")
    with pytest.raises(UserError, match="p belongs to a node"):
        capture.run("print p")


@pytest.mark.parametrize("line", ["continue", "next", "step", "until accepted >= 0"])
def test_at_the_last_step_running_on_names_the_way_back(recorded, line):
    """A replay opens on the last step."""
    said = over(recorded, len(recorded.steps) - 1).run(line)
    assert "nothing is left to run after the last step" in said
    assert "goto start goes before the first" in said
    assert "goto start" not in over(recorded, 2).run("continue")
    back = over(recorded, 2)
    assert (back.run("goto start"), back.session.position) == ("before the first step", -1)
    assert (back.run("goto end") != "", back.session.position) == (True, len(recorded.steps) - 1)


def test_goto_takes_a_request_and_its_step(capture, recorded):
    """As the g key's dialog and `specscope open FILE#REQUEST@STEP` do."""
    name = list(recorded.requests)[-1]
    request = recorded.requests[name]
    capture.run("next 9")
    for index in (2, 0, 4):
        said = capture.run(f"goto {name}@{index}")
        step = recorded.steps[request.at(index)].step
        assert (capture.session.record.step, capture.session.request) == (step, name)
        assert said.startswith(f"step {step}")
    assert capture.answer(f"goto {name}@2").stop.request == name
    at = capture.session.position
    other = next(iter(recorded.requests))
    for line, why in (
        (f"goto {other}", None),
        (f"goto {name}@999", f"'?{name}'? has no step 999; its steps: 0 to "),
        (f"goto {name}@x", "write a step number after @"),
        ("goto r99@0", "there is no request '?r99'?; there are: "),
    ):
        with pytest.raises(UserError, match=why) if why else nullcontext():
            capture.run(line)
        assert (capture.session.request, capture.session.position) == (other, at)


def test_a_step_that_rounding_changes_is_announced(tiny):
    """A request that ended gave its blocks up: its KV is computed again, here with much rounding."""
    commands = live(tiny)
    commands.run("continue")
    engine, last = commands.session.engine, commands.session.record.step
    compute = engine.runner.compute

    def coarse(table, tokens):
        yield from compute(table, tokens)
        slots = table.slots(0, len(tokens))
        for layer in range(len(engine.runner.cache.layers)):
            for store in engine.runner.cache.parts[layer]:
                store[:, slots] *= 1.5

    engine.runner.compute = coarse
    commands.run("goto 3")
    text = commands.run("continue")
    begins = commands.session.history.branches[1]
    assert f"step {begins.first - last + 3} was recomputed with other rounding: branch 1 begins here" in text
    assert "rounding" not in commands.run("goto 2")


def test_without_breakpoints_a_step_is_the_engines_and_the_append(engine, monkeypatch):
    """As a worker runs it: nobody looks at what happened in it, and nobody asks a session."""

    def unwanted(*_, **__):
        raise AssertionError("a run without breakpoints pays for nothing")

    monkeypatch.setattr("specscope.debug.breakpoints.events", unwanted)
    monkeypatch.setattr(Session, "cont", unwanted)
    stepper = Session(engine=engine.session.engine)
    for _ in range(3):
        assert stepper.advance() is None
    stepper.breakpoints.add("draft")
    with pytest.raises(AssertionError, match="pays for nothing"):
        stepper.advance()


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
    engine = tiny_engine(deep, **HOW)
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
        assert not any(StepFacts(run.steps[0], part.request, part, run, each)["ahead"] for each in range(len(tree)))
    assert {event.kind for event in found} == {EventKind.ACCEPT, EventKind.REJECT}


def test_nodes_that_are_rejected_below_rejected_ones_are_events_too(deep):
    """Under a rule that looks ahead."""
    engine = tiny_engine(deep, drafter="draft_model", draft_model="self:2", tree="3", rule="block")
    session = commands_over(engine).session
    engine.add("abcabcabcab", SamplingParams(temperature=1.5, max_tokens=30, seed=3, ignore_eos=True))
    session.cont()
    found = events_of(session.history, EventKind.REJECT)
    outcomes = [part.verdict.outcome for record in session.history.steps for part in record.requests]
    assert len(found) == sum(int((each == Outcome.REJECTED).sum()) for each in outcomes)
    below = [event for event in found if event.evidence["parent"] not in (-1, *event.evidence.part.verdict.path)]
    assert below


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
