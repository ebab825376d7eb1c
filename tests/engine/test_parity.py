"""Scheduling decides when a token comes: never which one, nor how many drafts were accepted.

Every drafter, synchronous and asynchronous, with plenty of KV blocks, few of them, a prefix cache and both, with all
kinds of parameters: the tokens and verdicts of the synchronous run with plenty. What was compared is printed as one
table at the end of the tests (tests/conftest.py).
"""

from dataclasses import dataclass, field
from itertools import product

import pytest

from specscope import SamplingParams
from specscope.analyze.findings import Exit
from specscope.analyze.verify.trial import judge
from specscope.engine.pipeline import Pipeline
from specscope.speculate.drafters.combined import model_of
from specscope.trace.history import History
from tests.analyze.audit.runs import Bench, failed
from tests.engine.cached import HEAD, pressed

pytest.importorskip("xgrammar")
WAVES = [
    [HEAD + "then one", HEAD + "then two, then", "abcabcabcabcabcabcabcabcabcabcabcabc", "x"],
    [HEAD + "then one", HEAD + "hello hello", "abcabcabcabcabcabcabcabcabcabcabcabcabc", HEAD * 2],
]
DRAFTERS = ["ngram", "suffix", "draft tree", "eagle", "eagle dynamic"]
OTHERS = ["none", "suffix+eagle", "suffix+draft", "ngram+eagle", "p-eagle"]
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
PRESSURE = {"plenty": (200, False), "few blocks": (13, False), "prefix cache": (200, True), "both": (13, True)}
HOW = list(product(("sync", "async"), PRESSURE))
TOKENS = 26
RARE = 5000  # tokens, of which one may part at a near tie


@dataclass
class Run:
    """What was generated, and what the pressure was."""

    history: History
    steps: dict = field(default_factory=dict)  # by request: each step's verdict, and the step
    preempted: int = 0
    found: int = 0

    @property
    def tokens(self):
        return {name: one.end.output.tolist() for name, one in self.history.requests.items()}


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("head"))


def run(engine, scheduling, pressure, **params):
    """Two waves of requests: the second one finds what the first one left."""
    pressed(engine, *PRESSURE[pressure])
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
    model = model_of(engine.drafter)
    assert engine.runner.cache.pool.used == 0
    assert model is None or model.cache.pool.used == 0
    return made


def note(made, record):
    made.history.append(record)
    made.preempted += len(record.preempted)
    for part in record.requests:
        made.found += part.found
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


def parted(wanted, got):
    """How many requests part at a near tie; fails where one does without."""
    ties = 0
    for name, steps in wanted.steps.items():
        pairs = zip(steps, got.steps[name], strict=False)
        first = next(((step, beside) for (one, step), (other, beside) in pairs if one != other), None)
        if first is not None:
            step, beside = first
            dtype = wanted.history.run.dtype
            near = step.verdict.near_ties(dtype) or step.parts_at_near_draw(beside.tree, dtype)
            assert near, f"{name} parts at step {step.index}, at no near tie"
            ties += 1
        else:
            assert got.tokens[name] == wanted.tokens[name]
    return ties


def proven(bench, engine, made):
    """`verify` and `audit` find nothing."""
    trial = judge(made.history, source="run")
    assert trial.failed == []
    assert trial.exit is Exit.CONSISTENT
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


@pytest.fixture(scope="module")
def partings():
    """Of all cells together: near ties at which a request parts must be rare."""
    all_of_them = {"tokens": 0, "parted": 0}
    yield all_of_them
    assert all_of_them["parted"] * RARE <= all_of_them["tokens"], all_of_them


@pytest.mark.parametrize(("name", "params", "temperature"), cells())
def test_tokens_and_verdicts_do_not_hang_on_scheduling(bench, partings, name, params, temperature, record_property):
    engine = bench.engine(name)
    told = {"temperature": TEMPERATURES[temperature], **PARAMS[params]}
    wanted, row = None, []
    for scheduling, pressure in HOW:
        got = run(engine, scheduling, pressure, **told)
        wanted = wanted or got
        assert (got.preempted > 0) == (pressure in ("few blocks", "both"))
        assert (got.found > 0) == (pressure in ("prefix cache", "both"))
        ties = parted(wanted, got)
        proven(bench, engine, got)
        tokens = sum(map(len, got.tokens.values()))
        partings["tokens"] += tokens
        partings["parted"] += ties
        row.append((tokens, ties))
    record_property("parity", [name, params, temperature, row])
