"""Memory pressure decides when a token comes, never which one, nor how many drafts were accepted."""

from dataclasses import dataclass

import pytest

from specscope import SamplingParams
from specscope.speculate.drafters.combined import model_of
from tests.engines import build_engines, fresh

HEAD = "the cat sat on the mat and the dog ran after the cat, "  # three full blocks
WAVES = [
    [HEAD + "then one", HEAD + "then two, then", "abcabcabcabcabcabcabcabcabcabcabcabc", "x"],
    [HEAD + "then one", HEAD + "hello hello", "abcabcabcabcabcabcabcabcabcabcabcabcabc", HEAD * 2],
]
DRAFTERS = ["ngram", "suffix", "draft tree", "eagle", "eagle dynamic", "suffix+eagle"]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("none", "suffix+draft", "ngram+eagle", "p-eagle")]
PRESSURE = {"plenty": (200, False), "few blocks": (13, False), "prefix cache": (200, True), "both": (13, True)}
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}
TOKENS = 26


@pytest.fixture(scope="module")
def engines(deep, tmp_path_factory):
    return build_engines(deep, tmp_path_factory.mktemp("head"))


@dataclass
class Run:
    """What was generated, and what the pressure was."""

    tokens: dict
    verdicts: dict
    preempted: int
    found: int


def pressed(engine, blocks, cached):
    """The engine as new, with so many KV blocks, with a prefix cache or without."""
    fresh(engine, blocks, cached=cached)
    engine.timeline = None


def settings(temperature, penalties):
    how = PENALTIES if penalties else {}
    return [
        SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=i, ignore_eos=True, **how) for i in range(4)
    ]


def run(engine, how, temperature=0.0, penalties=False, waves=WAVES):
    """Two waves of requests: the second one finds what the first one left."""
    pressed(engine, *PRESSURE[how])
    made = Run({}, {}, 0, 0)
    for number, wave in enumerate(waves):
        for i, (prompt, params) in enumerate(zip(wave, settings(temperature, penalties), strict=False)):
            engine.add(prompt, params, name=f"{number}.{i}")
        while engine.busy:
            note(made, engine.step())
    model = model_of(engine.drafter)
    assert engine.runner.cache.pool.used == 0
    assert model is None or model.cache.pool.used == 0
    return made


def note(made, record):
    made.preempted += len(record.preempted)
    for part in record.requests:
        made.found += part.found
        if part.verdict is not None:
            made.verdicts.setdefault(part.request, []).append(verdict(part))
    made.tokens |= {end.info.id: end.output.tolist() for end in record.finished}


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


@pytest.fixture(scope="module")
def plain(engines):
    """The run without pressure, by drafter and parameters."""
    known = {}

    def wanted(name, *params):
        if (name, *params) not in known:
            known[name, *params] = run(engines[name], "plenty", *params)
        return known[name, *params]

    return wanted


@pytest.mark.parametrize("penalties", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "penalties"])
@pytest.mark.parametrize("temperature", [0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("how", [pytest.param("few blocks", marks=pytest.mark.slow), "prefix cache", "both"])
@pytest.mark.parametrize("name", [*DRAFTERS, *OTHERS])
def test_tokens_and_verdicts_are_those_of_the_run_without_pressure(engines, plain, name, how, temperature, penalties):
    wanted, got = plain(name, temperature, penalties), run(engines[name], how, temperature, penalties)
    assert wanted.preempted == wanted.found == 0
    assert got.tokens == wanted.tokens
    assert got.verdicts == wanted.verdicts
    assert (got.preempted > 0) == (how != "prefix cache")
    assert (got.found > 0) == (how != "few blocks")
