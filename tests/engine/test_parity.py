"""Scheduling decides when a token comes: never which one, nor how many drafts were accepted.

Every drafter, synchronous and asynchronous, with plenty of KV blocks and with few of them, with all kinds of
parameters: the tokens and verdicts of the synchronous run with plenty. What was compared is printed as one table at the
end of the tests (tests/conftest.py).
"""

from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from specscope import SamplingParams
from specscope.analyze.findings import Exit
from specscope.analyze.verify.trial import judge
from specscope.debug.forked import part_at_near_draw
from specscope.engine.pipeline import Pipeline
from specscope.speculate.drafters.model_drafter import ModelDrafter
from specscope.trace.history.history import History
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import ROUNDING
from tests.analyze.audit.runs import Bench, failed
from tests.engines import HEAD, pressed

pytest.importorskip("xgrammar")
WAVES = [
    [HEAD + "then one", HEAD + "then two, then", "abcabcabcabcabcabcabcabcabcabcabcabc", "x"],
    [HEAD + "then one", HEAD + "hello hello", "abcabcabcabcabcabcabcabcabcabcabcabcabc", HEAD * 2],
]
DRAFTERS = ["ngram", "suffix", "draft tree", "eagle", "eagle dynamic"]
OTHERS = ["none", "p-eagle"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "array"}},
    "required": ["a", "b", "c"],
}
PARAMS = {
    "plain": {},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "JSON schema": {"structured_outputs": {"json": SCHEMA}},
    "logit bias": {"logit_bias": {70: 3.0, 71: -2.0, 80: 1.0}},
    "min-p": {"min_p": 0.05},
}
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
PRESSURE = {"plenty": 200, "few blocks": 13, "fewer blocks": 10}
HOW = list(product(("sync", "async"), PRESSURE))
TOKENS = 26
RARE = 5000  # compared tokens to each place where requests part: a near tie, whatever the pressures that meet it


@dataclass
class Run:
    """What was generated, and what the pressure was."""

    history: History
    steps: dict = field(default_factory=dict)  # by request: each step's verdict, and the step
    preempted: int = 0

    @property
    def tokens(self):
        return {name: one.end.output.tolist() for name, one in self.history.requests.items()}


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("head"))


def run(engine, scheduling, pressure, **params):
    """Two waves of requests."""
    pressed(engine, PRESSURE[pressure])
    engine.pipeline = Pipeline(engine._job, engine._account) if scheduling == "async" else None
    made = Run(History(engine.run_info, engine.vocabulary))
    for number, wave in enumerate(WAVES):
        for i, prompt in enumerate(wave):
            ends = "structured_outputs" in params
            one = SamplingParams(max_tokens=TOKENS, seed=i, ignore_eos=not ends, **params)
            engine.add(prompt, one, name=f"{number}.{i}")
        while engine.busy:
            note(made, engine.step())
    if engine.pipeline is not None:
        engine.pipeline.close()
        engine.pipeline = None
    assert engine.runner.cache.pool.used == 0
    assert not isinstance(engine.drafter, ModelDrafter) or engine.drafter.cache.pool.used == 0
    return made


def note(made, record):
    made.history.append(record)
    made.preempted += len(record.preempted)
    for part in record.requests:
        if part.verdict is not None:
            made.steps.setdefault(part.request, []).append((verdict(part), part))


def verdict(step):
    """All that was decided in a step, and on what."""
    v = step.verdict
    return (
        step.position,
        step.tree.token.tolist(),
        step.tree.parent.tolist(),
        v.outcome.tolist(),
        v.path.tolist(),
        v.coin.tolist(),
        (v.token, v.kind.value, v.final_coin),
    )


def near_tie(step, beside, dtype):
    """Whether the first decision in which two versions of a step differ is one that rounding in this dtype flips.

    Nodes are judged in the order of their numbers, and the final token is drawn after them: of two verdicts on one
    tree, all that comes after the first difference follows from it.
    """
    if step.position != beside.position:
        return False
    if verdict(step)[1:3] != verdict(beside)[1:3]:
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
        first = next(((step, beside) for (one, step), (other, beside) in pairs if one != other), None)
        if first is not None:
            step, beside = first
            assert near_tie(step, beside, wanted.history.run.dtype), (
                f"{name} parts at step {step.index}, at no near tie"
            )
            places.add((name, step.position))
        else:
            assert got.tokens[name] == wanted.tokens[name]
    return places


def proven(bench, engine, made, audited=True):
    """`verify` and `audit` find nothing."""
    trial = judge(made.history, source="run")
    assert trial.failed == []
    assert trial.exit is Exit.CONSISTENT
    if not audited:
        return
    found = bench.audit(engine, made.history)
    assert failed(found) == set()
    assert found.exit is Exit.CONSISTENT


def cells():
    """Each drafter and each kind of parameters is in an ordinary cell; all the others are slow tests."""
    for (i, name), (j, params), temperature in product(enumerate(DRAFTERS), enumerate(PARAMS), TEMPERATURES):
        ordinary = i == j and temperature == ("greedy", "sampled")[params != "plain"]
        yield pytest.param(name, params, temperature, marks=() if ordinary else pytest.mark.slow)
    for name, params, temperature in product(OTHERS, ("plain", "penalties"), TEMPERATURES):
        yield pytest.param(name, params, temperature, marks=pytest.mark.slow)


@dataclass
class Partings:
    """Of all cells together: the tokens that were compared, and the places where a request parted.

    A place is a near tie at one position of one request of one cell. Every run that rounds as another batch does may
    part there, synchronous or not, under any pressure: it is one place all the same.
    """

    tokens: int = 0
    places: set = field(default_factory=set)

    def are_rare(self):
        return len(self.places) * RARE <= self.tokens


@pytest.fixture(scope="module")
def partings():
    all_of_them = Partings()
    yield all_of_them
    assert all_of_them.are_rare(), all_of_them


@pytest.mark.parametrize(("name", "params", "temperature"), cells())
def test_tokens_and_verdicts_do_not_hang_on_scheduling(
    bench, partings, name, params, temperature, record_property, request
):
    """A slow cell audits each of its runs, an ordinary one the first and those that are under most pressure."""
    all_of_them = request.node.get_closest_marker("slow") is not None
    engine = bench.engine(name)
    told = {"temperature": TEMPERATURES[temperature], **PARAMS[params]}
    wanted, row = None, []
    for scheduling, pressure in HOW:
        got = run(engine, scheduling, pressure, **told)
        wanted = wanted or got
        assert (got.preempted > 0) == (pressure != "plenty")
        places = parted(wanted, got)
        proven(bench, engine, got, all_of_them or got is wanted or pressure == "fewer blocks")
        tokens = sum(map(len, got.tokens.values()))
        partings.tokens += tokens
        partings.places |= {(name, params, temperature, *place) for place in places}
        row.append((tokens, len(places)))
    record_property("parity", [name, params, temperature, row])


@pytest.fixture(scope="module")
def drafted(bench):
    """A sampled run, and the request and the number of a step of it whose first node was judged, at no near tie."""
    made = run(bench.engine("ngram"), "sync", "plenty", temperature=0.8)
    wide = 100 * ROUNDING["float32"]
    steps = ((name, i, step) for name, steps in made.steps.items() for i, (_, step) in enumerate(steps))
    name, number, _ = next(
        (name, i, step)
        for name, i, step in steps
        if len(step.tree) > 1 and step.verdict.margin[0] > wide and step.verdict.final_margin > wide
    )
    return made, name, number


def with_step(made, name, number, **changes):
    """The run, another verdict in one step."""
    _, step = made.steps[name][number]
    step = replace(step, verdict=replace(step.verdict, **changes))
    steps = list(made.steps[name])
    steps[number] = (verdict(step), step)
    return replace(made, steps={**made.steps, name: steps})


def tied(judged, node):
    """Changes of a verdict with which the margin of a node is a tenth of what rounding moves."""
    p = judged.p_trial.copy()
    p[node] = judged.coin[node] * judged.q_trial[node] + 0.1 * ROUNDING["float32"]
    return {"p_trial": p}


def flipped(judged, node):
    """Changes of a verdict with which a node has another outcome."""
    outcome = judged.outcome.copy()
    outcome[node] = Outcome.REJECTED if outcome[node] == Outcome.ACCEPTED else Outcome.ACCEPTED
    return {"outcome": outcome}


def test_a_request_may_part_at_the_decision_that_is_a_near_tie_alone(drafted):
    made, name, number = drafted
    judged = made.steps[name][number][1].verdict
    at_the_first_node = with_step(made, name, number, **flipped(judged, 0))
    at_the_final_token = with_step(made, name, number, token=judged.token + 1)
    other_coin = with_step(made, name, number, **flipped(judged, 0), coin=judged.coin + 1e-9)
    for other in (at_the_first_node, at_the_final_token, other_coin):
        with pytest.raises(AssertionError, match="at no near tie"):
            parted(made, other)
    near_node = with_step(made, name, number, **tied(judged, 0))
    near_final = with_step(made, name, number, final_margin=0.1 * ROUNDING["float32"])
    place = {(name, made.steps[name][number][1].position)}
    assert parted(near_node, near_node) == set()
    assert parted(near_node, at_the_first_node) == place
    assert parted(near_final, at_the_final_token) == place
    for wanted, other in (
        (near_node, at_the_final_token),
        (near_final, at_the_first_node),
        (near_node, other_coin),
    ):
        with pytest.raises(AssertionError, match="at no near tie"):
            parted(wanted, other)


def test_a_place_counts_once_and_two_among_few_tokens_are_too_many():
    cell, other = ("suffix", "penalties", "sampled", "0.1", 71), ("suffix", "penalties", "sampled", "0.1", 72)
    assert Partings(RARE, {cell}).are_rare()
    assert not Partings(RARE - 1, {cell}).are_rare()
    assert not Partings(2 * RARE - 1, {cell, other}).are_rare()
    assert Partings(2 * RARE, {cell, other}).are_rare()
