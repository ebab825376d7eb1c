"""The walk goes on behind the logits: faults of sampling and verdict that bfloat16 hides from every other judge."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from specscope.analyze.findings import Exit
from tests.analyze.locate import planted as sampled
from tests.faults import settings
from tests.faults.fault import in_every_engine
from tests.faults.judged import diagnosed
from tests.faults.planted.rules import cut_first, params_of
from tests.faults.planted.trials import coin_again, tried, unchanged
from tests.faults.settings import DRAFTERS, RULES, WARM, Setting, record

HOT = {"temperature": 1.2}


@dataclass(frozen=True)
class Planted:
    """A fault, the run in which it shows, and the place that must come first."""

    install: Callable
    drafter: str
    place: str
    looks: str = ""
    params: dict = field(default_factory=lambda: WARM)
    rule: str = "standard"
    requests: int = 6


more_p = params_of(lambda params: {"min_p": 8 * params.min_p})
harder = tried(accept=lambda coin, a, q: coin * 1.1 < a)
FAULTS = {
    "top-k": Planted(
        sampled.one_token_more, "model tree", "sampling: top-k", "one more token", {**HOT, "top_k": 4}, requests=3
    ),
    "top-p": Planted(cut_first, "model tree", "sampling: top-p", "before", {**HOT, "top_p": 0.8}),
    "min-p": Planted(more_p, "model tree", "sampling: min-p", params={**HOT, "min_p": 0.02}, requests=4),
    "head": Planted(sampled.louder_now_and_then, "eagle tree", "drafter: lm_head", "1.05", requests=3),
    "block": Planted(sampled.without_the_path, "early chain", "verdict: acceptance", rule="block"),
    "decision": Planted(harder, "early chain", "verdict: acceptance"),
    "residual": Planted(tried(reject=unchanged), "ngram tree", "verdict: residual"),
    "q": Planted(sampled.q_doubled_where_late, "early tree", "verdict: q"),
    "p of the next request": Planted(sampled.judged_by_the_next_request, "early chain", "verdict: p", params=HOT),
    "q one step old": Planted(sampled.q_one_step_old, "early chain", "verdict: q", params=HOT),
    "match": Planted(sampled.children_first, "early tree", "verdict: p", rule="match"),
    "final": Planted(sampled.likeliest, "early tree", "verdict: final draw"),
    "entropy": Planted(sampled.entropy_in_bits, "model tree", "verdict: entropy"),
    "coin": Planted(coin_again, "model tree", "verdict: coin"),
}


def of(planted, folder, dtype):
    """A run in a dtype, judged with the fault in every engine."""
    how = {**DRAFTERS[planted.drafter], "dtype": dtype, "rule": planted.rule}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.DRAFTERS, "here", how)
        setting = Setting("here", planted.params, requests=planted.requests, tokens=40)
        return diagnosed(record(setting, folder / "run.jsonl"), setting, place=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("top-k", "head") else pytest.mark.slow) for name in FAULTS],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_fault_behind_the_logits_has_a_place(tmp_path, name, dtype):
    planted = FAULTS[name]
    with in_every_engine(planted.install):
        found = of(planted, tmp_path, dtype)
    assert found.exit is Exit.INCONSISTENT
    places = [f"{item.operation.stage.value}: {item.operation.name}" for item in found.located]
    assert planted.place in places, (places, found.unexplained, found.ruled_out, found.left_out, found.declined)
    first = found.located[places.index(planted.place)]
    assert planted.looks in first.looks, (first.looks, first.sentence)
    assert name != "decision" or not first.looks  # a is right: no formula stands in its place
    assert first.smallest


FORM = {"structured_outputs": {"regex": "[a-z ]{5,30}"}, "logprobs": 3}
BIAS = {"presence_penalty": 0.7, "logit_bias": {5: 1.5, 9: -3.0}}
HEALTHY = {
    "greedy tree": Planted(None, "model tree", "", params={}),
    "rules": Planted(None, "model tree", "", params=RULES),
    "cuts": Planted(None, "eagle tree", "", params={**HOT, "top_k": 7, "top_p": 0.8, "min_p": 0.02}, requests=3),
    "cold": Planted(None, "early chain", "", params={"temperature": 1e-4}),
    "coldest": Planted(None, "early chain", "", params={"temperature": 1e-38}),
    "dynamic": Planted(None, "eagle dynamic", ""),
    "lookup": Planted(None, "ngram tree", ""),
    "suffix": Planted(None, "suffix", "", params={"temperature": 0.7, "top_p": 0.9}),
    "no drafter": Planted(None, "none", ""),
    "block": Planted(None, "early chain", "", rule="block", requests=3),
    "traversal": Planted(None, "early tree", "", rule="traversal"),
    "hot": Planted(None, "early chain", "", params=HOT),
    "match": Planted(None, "early tree", "", rule="match"),
    "form": Planted(None, "model tree", "", params={**WARM, **FORM}),
    "bias": Planted(None, "model chain", "", params={**HOT, **BIAS}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "cuts" else pytest.mark.slow) for name in HEALTHY]
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_nothing_is_said_of_a_healthy_run(tmp_path, name, dtype):
    found = of(HEALTHY[name], tmp_path, dtype)
    assert (found.located, found.faults, found.unexplained) == ((), (), ())
    assert any("run again" in line for line in found.ruled_out), (found.ruled_out, found.declined)
    hidden = [note for note in found.notes if "record with --dtype float32" in note]
    assert len(hidden) == (dtype == "bfloat16"), found.notes
    assert all("is invisible in bfloat16: rounding explains how far" in note for note in hidden)
