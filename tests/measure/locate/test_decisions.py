"""The walk goes on behind the logits: faults of sampling and verdict that bfloat16 hides from every other judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from specscope.analyze.findings import Exit
from specscope.speculate import sampling
from specscope.speculate.verify import distribution, match, traversal, verifier
from tests.analyze.locate.planted import judged_by_the_next_request, q_one_step_old
from tests.faults import settings
from tests.faults.fault import in_every_engine
from tests.faults.judged import diagnosed
from tests.faults.planted.rules import cut_first, params_of
from tests.faults.planted.trials import coin_again, tried, unchanged
from tests.faults.settings import DRAFTERS, RULES, WARM, Setting, record

HOT = {"temperature": 1.2}


def one_token_more(patch, engine):
    """Top-k keeps one token too many."""
    right = sampling.softmax_
    more = lambda params: replace(params, top_k=params.top_k and params.top_k + 1)  # noqa: E731
    patch.setattr(sampling, "softmax_", lambda rows, params: right(rows, more(params)))


def louder_now_and_then(patch, engine):
    """One row of seven of the head's logits is 1.05 times too large."""
    runner = engine.drafter.runner
    right, count = runner.lm_head, [0]

    def lm_head(x):
        out = right(x).clone()
        rows = torch.arange(count[0], count[0] + len(out))
        count[0] += len(out)
        out[rows % 7 == 0] *= 1.05
        return out

    patch.setattr(runner, "lm_head", lm_head)


def without_the_path(patch, engine):
    """The block rule's ratio forgets the path before it."""
    right = traversal._Walk.below

    def below(self, row, ratio, *, root=False):
        return right(self, row, 1.0 if ratio < 1 and self.children[row] else ratio, root=root)

    patch.setattr(traversal._Walk, "below", below)


def q_doubled_where_late(patch, engine):
    """From the second sibling on, q is not what was left of it."""
    patch.setattr(distribution, "without", lambda q, token: q)


def children_first(patch, engine):
    """Under match the token is drawn from what the children leave, with the children's coin."""
    patch.setattr(match, "_draw", _drawn_late(match._draw))


def _drawn_late(right):
    def draw(batch, children, p, found):
        for child in children:
            p, _ = p.reject(int(batch.trees.token[child]), None)
        return right(batch, children, p, found)

    return draw


def final_of_the_root(patch, engine):
    """The final token is the likeliest one, whatever the coin."""
    likeliest = lambda self, coin: (int(self.row.argmax()), float(self.row.max()), 1.0)  # noqa: E731
    patch.setattr(distribution.Residual, "draw", likeliest)


def entropy_in_bits(patch, engine):
    """Entropies are told in bits."""
    right = verifier.ParentsBuilder.done

    def done(self, nodes, final, final_target_p):
        self.parent["entropy"] = self.parent["entropy"] / 0.6931
        return right(self, nodes, final, final_target_p)

    patch.setattr(verifier.ParentsBuilder, "done", done)


@dataclass(frozen=True)
class Planted:
    """A fault, the run in which it shows, and the place that must come first."""

    install: Callable
    drafter: str
    place: str
    looks: str = ""
    params: dict = field(default_factory=lambda: WARM)
    rule: str = "standard"


FAULTS = {
    "top-k": Planted(one_token_more, "model tree", "sampling: top-k", "one more token", {**HOT, "top_k": 4}),
    "top-p": Planted(cut_first, "model tree", "sampling: top-p", "before", {**HOT, "top_p": 0.8}),
    "min-p": Planted(
        params_of(lambda params: {"min_p": 1.4 * params.min_p}),
        "model tree",
        "sampling: min-p",
        params={**HOT, "min_p": 0.05},
    ),
    "head": Planted(louder_now_and_then, "eagle tree", "drafter: lm_head", "1.05"),
    "block": Planted(without_the_path, "early chain", "verdict: acceptance", rule="block"),
    "decision": Planted(tried(accept=lambda coin, a, q: coin * 1.1 < a), "early chain", "verdict: acceptance"),
    "residual": Planted(tried(reject=unchanged), "ngram tree", "verdict: residual"),
    "q": Planted(q_doubled_where_late, "early tree", "verdict: q"),
    "p of the next request": Planted(judged_by_the_next_request, "early chain", "verdict: p", params=HOT),
    "q one step old": Planted(q_one_step_old, "early chain", "verdict: q", params=HOT),
    "match": Planted(children_first, "early tree", "verdict: p", rule="match"),
    "final": Planted(final_of_the_root, "early tree", "verdict: final draw"),
    "entropy": Planted(entropy_in_bits, "model tree", "verdict: entropy"),
    "coin": Planted(coin_again, "model tree", "verdict: coin"),
}


def of(planted, folder, dtype, requests=6):
    """A run in a dtype, judged with the fault in every engine."""
    how = {**DRAFTERS[planted.drafter], "dtype": dtype, "rule": planted.rule}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.DRAFTERS, "here", how)
        setting = Setting("here", planted.params, requests=requests, tokens=40)
        return diagnosed(record(setting, folder / "run.jsonl"), setting, place=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("top-k", "min-p", "head") else pytest.mark.slow) for name in FAULTS],
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


HEALTHY = {
    "greedy tree": Planted(None, "model tree", "", params={}),
    "rules": Planted(None, "model tree", "", params=RULES),
    "cuts": Planted(None, "eagle tree", "", params={**HOT, "top_k": 7, "top_p": 0.8, "min_p": 0.02}),
    "cold": Planted(None, "early chain", "", params={"temperature": 1e-4}),
    "coldest": Planted(None, "early chain", "", params={"temperature": 1e-38}),
    "dynamic": Planted(None, "eagle dynamic", ""),
    "lookup": Planted(None, "ngram tree", ""),
    "suffix": Planted(None, "suffix", "", params={"temperature": 0.7, "top_p": 0.9}),
    "no drafter": Planted(None, "none", ""),
    "block": Planted(None, "early chain", "", rule="block"),
    "traversal": Planted(None, "early tree", "", rule="traversal"),
    "p of the next request": Planted(judged_by_the_next_request, "early chain", "verdict: p", params=HOT),
    "q one step old": Planted(q_one_step_old, "early chain", "verdict: q", params=HOT),
    "match": Planted(None, "early tree", "", rule="match"),
    "form": Planted(
        None, "model tree", "", params={**WARM, "structured_outputs": {"regex": "[a-z ]{5,30}"}, "logprobs": 3}
    ),
    "bias": Planted(None, "model chain", "", params={**HOT, "presence_penalty": 0.7, "logit_bias": {5: 1.5, 9: -3.0}}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("cuts", "block") else pytest.mark.slow) for name in HEALTHY]
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_nothing_is_said_of_a_healthy_run(tmp_path, name, dtype):
    found = of(HEALTHY[name], tmp_path, dtype)
    assert (found.located, found.faults, found.unexplained) == ((), (), ())
    assert any("run again" in line for line in found.ruled_out), (found.ruled_out, found.declined)
    hidden = [note for note in found.notes if "record with --dtype float32" in note]
    assert len(hidden) == (dtype == "bfloat16"), found.notes
    assert all("is invisible in bfloat16: rounding explains how far" in note for note in hidden)
