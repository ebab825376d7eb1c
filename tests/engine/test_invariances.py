"""What a request is given hangs on the request alone: every drafter (a row) by every way of running it (a column).

Requests of all kinds run together. In each column a greedy one is given the tokens of plain decoding, and any other the
tokens and the verdicts of the first column; these up to decisions that rounding flips, which are looked at one by one,
and few. `verify` and `audit` find nothing in the run under most pressure.
"""

from dataclasses import dataclass, field, replace

import pytest

from specscope import SamplingParams
from specscope.analyze.findings import Exit
from specscope.analyze.verify.trial import judge
from specscope.debug.forked import part_at_near_draw
from specscope.speculate.drafters.model_drafter import ModelDrafter
from specscope.trace.history.history import History
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import ROUNDING
from tests.analyze.audit.runs import Bench, failed
from tests.engines import DRAFTERS, HEAD, LIKE_ANOTHER, fresh
from tests.heads import head_tensors

pytest.importorskip("xgrammar")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "array"}},
    "required": ["a", "b", "c"],
}
KNOWN = [token + shift for token, shift in enumerate(head_tensors()["d2t"].tolist())]  # what a head can draft
# Random models never agree. Under these, which move both alike, four tokens are left and they agree now and then.
FOUR, OTHERS = ({"logit_bias": {KNOWN[at]: 50.0 for at in places}} for places in ((11, 23, 37, 48), (25, 45, 52, 53)))
PENALISED = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}
ABC = "abcabcabcabcabcabcabcabcabcabcabcabc"
REQUESTS = [  # each greedy and sampled
    (HEAD + "then one", FOUR),
    ("x", OTHERS),
    (HEAD + "hello hello", {"top_k": 30, "top_p": 0.9}),
    (ABC, PENALISED),
    ("abcdefghijklmnopqrstuvwxy", {"logit_bias": {70: 3.0, 71: -2.0, 80: 1.0}}),  # a token more than a step takes
    (HEAD * 2, {"structured_outputs": {"json": SCHEMA}}),
    ("hello hello hel", {"structured_outputs": {"regex": "([a-c]{2}|x)*"}, "min_tokens": 6}),
    ("the cat sat on the mat, the cat", {"min_p": 0.02, "stop": ("a", "e")}),
]
ALL = [
    SamplingParams(max_tokens=14, seed=20 + i, temperature=t, ignore_eos="structured_outputs" not in how, **how)
    for t in (0.0, 0.9)
    for i, (_, how) in enumerate(REQUESTS)
]
WAYS = {  # the first is what the others are held against
    "together": {},
    "alone": {"alone": True},
    "backwards, by twos, in other chunks": {"order": -1, "batch": 2, "budget": 41},
    "few blocks": {"blocks": 10},
    "few blocks, ahead": {"blocks": 10, "ahead": True},
    "few blocks, back and on": {"blocks": 11, "back": (4, 9, 17, 30)},
}
IN_TURN = [way for way in WAYS if way not in ("few blocks", "few blocks, ahead")]
EASY = {"together": {}, "together, ahead": {"ahead": True}, "back and on": {"back": (4, 9, 17)}}  # and not pressed
ROWS = [*DRAFTERS, "same model", "dynamic model", "eagle-1", "own"]
# Random drafters draft one token over and over; behind a norm of ones all features of the first EAGLE, and of modules,
# are of one length
REPEATING = (
    "draft tree",
    "p-eagle",
    "p-eagle chain",
    "p-eagle dynamic",
    "dflash",
    "dflash chain",
    "dflash dynamic",
    "mtp-3",
)
BUT = {row: {"placeholders"} for row in REPEATING} | {row: {"features fed"} for row in ("eagle-1", "mtp")}
BUT["mtp-3"] |= {"features fed"}


def some_of(row):
    """The WAYS of a row in the ordinary suite, with each second request: of some, which take turns, one."""
    at = ROWS.index(row)
    one, part = IN_TURN[at % len(IN_TURN)], slice(at % 2, None, 2)
    return {way: how | {"part": part} for way, how in WAYS.items() if way not in IN_TURN or way == one}


EVERY = {"some": some_of, "pressed": lambda row: WAYS, "easy": lambda row: EASY}
ALIKE = (*LIKE_ANOTHER, "same model", "dynamic model", "eagle-1", "none")  # the last is what `plain` runs
RARE = 5000  # compared tokens to each place where requests part: a near tie, whatever the ways that meet it


@dataclass
class Run:
    """What was generated, and what the pressure was."""

    history: History
    steps: dict = field(default_factory=dict)  # by request: its steps with a verdict
    tokens: dict = field(default_factory=dict)
    preempted: int = 0


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("head"), async_scheduling=True)


def run(engine, blocks=200, batch=3, budget=24, order=1, back=(), part=slice(None), *, ahead=False, alone=False):
    """All requests, or a part, in one of the WAYS. With a timeline steps are run one by one."""
    fresh(engine, blocks)
    engine.scheduler.max_batch, engine.scheduler.max_step_tokens = batch, budget
    timeline, records, left = engine.timeline, [], list(back)
    if ahead:
        engine.timeline = None
    asked = [(f"r{i}", REQUESTS[i % len(REQUESTS)][0], params) for i, params in enumerate(ALL)]
    asked = asked[part][::order]
    for group in [[one] for one in asked] if alone else [asked]:
        for name, prompt, params in group:
            engine.add(prompt, params, name=name)
        while engine.busy:
            if left and len(records) == left[0]:
                begun = left.pop(0)
                for _ in range(begun % 5):  # a step that was begun is given up
                    engine.phase()
                engine.rewind(records[begun - 4].step)
                del records[begun - 4 :]
            record = engine.step()  # of a step that is run again, the known record
            records.append(engine.last.record(notes=True) if back else record)
    engine.pipeline.close()
    assert timeline.branches == 1, "what was run again came out otherwise"
    assert engine.runner.cache.pool.used == 0
    if isinstance(engine.drafter, ModelDrafter):
        assert (engine.drafter.cache.pool.used, engine.drafter.states) == (0, {})
    made = Run(History(engine.run_info, engine.vocabulary))
    for record in records:
        made.history.append(record)
        made.preempted += len(record.preempted)
        made.tokens |= {end.info.id: end.output.tolist() for end in record.finished}
        for part in (part for part in record.requests if part.verdict is not None):
            made.steps.setdefault(part.request, []).append(part)
    return made


def decided(step):
    """All that was decided in a step, and on what."""
    tree, v = step.tree, step.verdict
    drafted, coins = (tree.token.tolist(), tree.parent.tolist()), (v.coin.tolist(), v.final_coin)
    return step.position, drafted, coins, v.outcome.tolist(), v.path.tolist(), v.token, v.kind


def near_tie(step, beside, dtype):
    """Whether the first decision in which two versions of a step differ is one that rounding in this dtype flips.

    Nodes are judged in the order of their numbers, and the final token is drawn after them: of two verdicts on one
    tree, all that comes after the first difference follows from it.
    """
    if step.position != beside.position:
        return False
    if decided(step)[1] != decided(beside)[1]:
        return part_at_near_draw(step, beside, dtype)
    mine, theirs = step.verdict, beside.verdict
    nodes = len(mine.outcome)
    first = next((node for node in range(nodes) if mine.outcome[node] != theirs.outcome[node]), nodes)
    same_coins = mine.coin[: first + 1].tolist() == theirs.coin[: first + 1].tolist()
    if first == nodes:  # all outcomes are the same: the final token's draw is what differs
        same_coins = same_coins and mine.final_coin == theirs.final_coin
    return same_coins and first in mine.near_ties(dtype)


def parted(wanted, got):
    """Where requests part, each at a near tie: (request, position). Fails where one parts at another decision."""
    places = set()
    for name, steps in wanted.steps.items():
        pairs = zip(steps, got.steps[name], strict=False)
        first = next(((step, beside) for step, beside in pairs if decided(step) != decided(beside)), None)
        if first is not None:
            assert near_tie(*first, wanted.history.run.dtype), f"{name} parts at step {first[0].index}, at no near tie"
            places.add((name, first[0].position))
        else:
            assert got.tokens[name] == wanted.tokens[name]
    return places


def timeless(record):
    """A record without what a clock said."""
    ends = tuple((end.info.id, end.reason, end.stop, end.output.tolist()) for end in record.finished)
    admitted = tuple(info.id for info in record.admitted)
    return replace(record, phases=(), passes=(), device_ns=(), flight=None, finished=ends, admitted=admitted)


def proven(bench, engine, made, but):
    """`verify` and `audit` find nothing, `but` a check of random weights."""
    trial, found = judge(made.history, source="run"), bench.audit(engine, made.history)
    assert {finding.name for finding in trial.failed} <= but
    assert failed(found) == set()
    exits = {Exit.NOT_JUDGED if engine.config.is_own else Exit.CONSISTENT}
    if (
        "features fed" in but and engine.config.drafter == "eagle"
    ):  # which doubles rounding: it may be too much to judge
        exits.add(Exit.NOT_JUDGED)
    assert found.exit in exits


@pytest.fixture(scope="module")
def plain(bench):
    return run(bench.engine("none"))


@pytest.fixture(scope="module")
def compared():
    """Tokens of all cells together, and the places at which a request parted in any of its row's."""
    of_all = {"tokens": 0, "places": set()}
    yield of_all
    assert len(of_all["places"]) * RARE <= of_all["tokens"], of_all


@pytest.mark.parametrize("row", [pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ()) for n in ROWS])
@pytest.mark.parametrize("ways", [pytest.param(n, marks=pytest.mark.slow if n != "some" else ()) for n in EVERY])
def test_tokens_and_verdicts_hang_on_the_request_alone(bench, plain, compared, row, ways):
    engine, ways, wanted, runs = bench.engine(row), EVERY[ways](row), None, {}
    for way, how in ways.items():
        got = runs[way] = run(engine, **how)
        wanted = wanted or got
        assert (got.preempted > 0) == ("blocks" in how), way
        greedy = [name for i in range(len(REQUESTS)) if (name := f"r{i}") in got.tokens]
        assert [got.tokens[name] for name in greedy] == [plain.tokens[name] for name in greedy], way
        compared["places"] |= {(row, *place) for place in parted(wanted, got)}
        compared["tokens"] += sum(map(len, got.tokens.values()))
    ahead = next(way for way in ways if way.endswith("ahead"))
    proven(bench, engine, runs[ahead], BUT.get(row, set()))
    one, other = ([*map(timeless, runs[way].history.steps)] for way in (ahead.removesuffix(", ahead"), ahead))
    assert one == other  # with all their evidence, bit for bit; who waited, and which blocks are used
    accepted = {step.verdict.accepted for steps in wanted.steps.values() for step in steps}
    assert (max(accepted) > 0) == (row != "none")


@pytest.mark.parametrize("row", ["eagle", "p-eagle dynamic"])
def test_the_end_of_the_context_is_reached(bench, row):
    """Near it no tree fits any more, and features of the last steps go unused."""
    outputs = []
    for engine in (bench.engine("none"), bench.engine(row)):
        fresh(engine, 200)
        (result,) = engine.generate("a" * 495, SamplingParams(max_tokens=99, ignore_eos=True))
        outputs.append(result.token_ids)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 512 - 495


def test_a_request_may_part_at_the_decision_that_is_a_near_tie_alone(bench):
    made, wide = run(bench.engine("ngram"), part=slice(0, None, 2)), 100 * ROUNDING["float32"]
    name, number, step = next(
        (name, number, step)
        for name, steps in made.steps.items()
        for number, step in enumerate(steps)
        if len(step.tree) > 1 and step.verdict.margin[0] > wide and step.verdict.final_margin > wide
    )
    old = step.verdict

    def but(base=old, **changes):
        """The run with another verdict in that step."""
        steps = list(made.steps[name])
        steps[number] = replace(step, verdict=replace(base, **changes))
        return replace(made, steps=made.steps | {name: steps})

    other, p = old.outcome.copy(), old.p_trial.copy()
    other[0] = Outcome.REJECTED if old.outcome[0] == Outcome.ACCEPTED else Outcome.ACCEPTED
    p[0] = old.coin[0] * old.q_trial[0] + 0.1 * ROUNDING["float32"]
    at_node, at_final = but(outcome=other), but(token=old.token + 1)
    other_coin = but(outcome=other, coin=old.coin + 1e-9)
    near_node, near_final = but(p_trial=p), but(final_margin=0.1 * ROUNDING["float32"])
    assert parted(near_node, near_node) == set()
    assert parted(near_node, at_node) == parted(near_final, at_final) == {(name, step.position)}
    for wanted, got in [
        *((made, got) for got in (at_node, at_final, other_coin)),
        *((near_node, at_final), (near_final, at_node), (near_node, other_coin)),
    ]:
        with pytest.raises(AssertionError, match="at no near tie"):
            parted(wanted, got)
