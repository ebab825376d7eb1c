"""Logits to p by each parameter, which tokens a form allows, draws from rows, and which changes of a fork matter."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.speculate.allowed import Allowed, allows, unpacked
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.drafters.text import pruned
from specscope.speculate.sampling import LogitRows, all_probabilities
from specscope.speculate.verify.batch import step_batch
from specscope.speculate.verify.distribution import BLOCK, Chosen, Residual, draw_margin, draw_siblings
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import ROOT, DraftTree

VOCAB = 30


def reference(logits, params, prompt, output):
    """The same processing, written plainly in float64 on one row."""
    row = np.array(logits, dtype=np.float64)
    for token, value in params.logit_bias.items():
        if token < VOCAB:
            row[token] += value
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if params.greedy:
        return np.eye(VOCAB)[np.argmax(row)]
    row = row / params.temperature
    probs = np.exp(row - row.max())
    probs /= probs.sum()
    keep = probs >= params.min_p * probs.max()
    if params.top_k:
        kept = np.sort(probs[keep])[::-1]
        keep &= probs >= kept[min(params.top_k, len(kept)) - 1]
    probs = np.where(keep, probs, 0) / probs[keep].sum()
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        mass = np.cumsum(probs[order])
        last = int(np.searchsorted(mass, params.top_p))
        probs = np.where(probs >= probs[order[min(last, VOCAB - 1)]], probs, 0)
    return probs / probs.sum()


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@given(
    seed=st.integers(0, 999),
    prompt=tokens,
    output=tokens,
    paths=st.lists(tokens, min_size=1, max_size=4),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 5, 40]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.4]),
        logit_bias=st.sampled_from([{}, {3: 2.0, 7: -5.0}, {99: 1.0}]),
    ),
)
@settings(max_examples=80)
def test_every_row_is_processed_along_its_own_path(seed, prompt, output, paths, params):
    logits = torch.randn(len(paths), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    rows = LogitRows(logits, params, [*prompt, *output], len(prompt), paths).distributions()
    assert torch.equal(logits, before)
    for row, path, numbers in zip(rows, paths, logits.tolist(), strict=True):
        wanted = reference(numbers, params, prompt, output + path)
        got = np.eye(VOCAB)[row.token] if isinstance(row, Chosen) else row.row.numpy()
        assert got == pytest.approx(wanted, abs=2e-6)
        assert got.sum() == pytest.approx(1, abs=1e-5)


def test_top_p_is_right_where_the_first_look_lacks_mass(monkeypatch):
    monkeypatch.setattr("specscope.speculate.sampling.PREFILTER", 4)
    monkeypatch.setattr("specscope.speculate.sampling.WIDER", 3)
    width = torch.tensor([0.01, 0.1, 1.0, 3.0, 30.0])[
        :, None
    ]  # of the flattest all 30 are looked at, of others 4 or 12
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) * width
    params = SamplingParams(temperature=1.0, top_p=0.9)
    for row, numbers in zip(LogitRows(logits, params).distributions(), logits.tolist(), strict=True):
        assert isinstance(row, Residual)
        assert row.row.numpy() == pytest.approx(reference(numbers, params, [], []), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.8])
def test_huge_penalties_and_biases_never_give_nan(dtype, temperature):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype) * 100
    logits[:, 5] = -torch.inf  # what a drafter of a reduced vocabulary does not know
    extremes = {"presence_penalty": 2.0, "frequency_penalty": -2.0, "min_p": 1e-300, "top_p": 1e-300}
    for repetition in (1e-6, 1e12):
        bias = {5: 1e6, 3: -1e6, 4: 1e6}
        params = SamplingParams(temperature=temperature, repetition_penalty=repetition, logit_bias=bias, **extremes)
        for row in LogitRows(logits, params, [1, 2, 5, 3, 5], 3, [[], [5], [5, 4]]).distributions():
            assert row.prob(5) == 0
            if isinstance(row, Residual):
                assert not row.row.isnan().any()
                assert float(row.row.sum()) == pytest.approx(1)


V = 77  # not a multiple of 32


def test_bits_are_tokens():
    allowed = Allowed(V, (0, 31, 32, 63, 76), min_tokens=1)
    (row,) = allowed.rows([], [[]])
    assert np.flatnonzero(~unpacked(row[None], V)[0]).tolist() == [0, 31, 32, 63, 76]
    assert [allows(row, token) for token in (0, 1, 31, 32, 33, 76)] == [False, True, False, False, True, False]


def test_the_least_length_counts_output_and_path():
    allowed = Allowed(V, (2,), min_tokens=3)
    rows = allowed.rows([5], [[], [6], [6, 7], [6, 7, 8]])
    assert [allows(row, 2) for row in rows] == [False, False, True, True]
    assert allowed.rows([5, 6, 7], [[]]) is None  # all may come: nothing is computed


@pytest.mark.parametrize("kind", [{}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.4}])
def test_what_is_refused_has_no_mass_and_the_rest_keeps_its_shares(kind):
    torch.manual_seed(1)
    logits, refused = torch.randn(3, V), np.random.default_rng(1).random((3, V)) < 0.6
    packed = np.packbits(~refused, axis=1, bitorder="little")
    rows = np.zeros((3, 12), np.uint8)
    rows[:, : packed.shape[1]] = packed
    params = SamplingParams(temperature=0.8, **kind)
    part = LogitRows(logits, params, paths=[[], [], []], allowed=rows.view(np.int32))
    p = all_probabilities([part])
    assert float(p[torch.from_numpy(refused)].sum()) == 0
    assert p.sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    wanted = all_probabilities([LogitRows(logits.masked_fill(torch.from_numpy(refused), -1e9), params, paths=[[]] * 3)])
    assert torch.allclose(p, wanted, atol=1e-6)
    assert torch.equal(logits, logits.clone())


def test_pruning_keeps_what_may_come_behind_its_own_path():
    """EOS at the root is refused, and all below it; two deep it may come."""
    tree = DraftTree.build([2, 5, 6, 2, 7], [ROOT, ROOT, 0, 1, 1])
    draft = Draft(tree, method=MethodNotes(confidence=np.linspace(0.9, 0.1, 5, dtype=np.float32)))
    context = Context("r", [9, 9], 2, SamplingParams(min_tokens=1), allowed=Allowed(V, (2,), min_tokens=1))
    left = pruned(draft, context)
    assert (left.tree.token.tolist(), left.tree.parent.tolist()) == ([5, 2, 7], [ROOT, 0, 0])
    assert (left.pruned, left.method.confidence.tolist()) == (2, pytest.approx([0.7, 0.3, 0.1]))
    assert pruned(draft, Context("r", [9, 9], 2, SamplingParams())) is draft


WARM, GREEDY = SamplingParams(temperature=0.8, seed=1), SamplingParams(seed=1)


def told(changes: Changes, before: SamplingParams, *, lossless: bool = True, ended: bool = False) -> str:
    after = dataclasses.replace(before, **changes.params)
    return changes.explaining(before, after, lossless=lossless, ended=ended)


@pytest.mark.parametrize(
    ("changes", "before", "expected"),
    [
        (Changes(params={"temperature": 0.7}), GREEDY, "temperature=0.7"),
        (Changes(params={"temperature": 0.8}), WARM, ""),  # it was that before
        (Changes(params={"seed": 9}), WARM, "seed=9"),
        (Changes(params={"seed": 9, "top_k": 5}), GREEDY, ""),  # neither moves the likeliest token
        (Changes(params={"presence_penalty": 0.5}), GREEDY, "presence_penalty=0.5"),
        (Changes(params={"max_tokens": 9}), WARM, ""),  # the outputs part before their ends
        (Changes(engine={"drafter": "ngram"}), WARM, "drafter=ngram"),  # other drafts, other coins
        (Changes(coins={(4, 0): 0.1}), WARM, "coin of node 0 0.1"),
        (Changes(coins={(4, 0): 0.1}), GREEDY, ""),
        (Changes(outcomes={(4, 0): False}), GREEDY, "node 0 rejected"),
        (Changes(tokens={4: 65}), GREEDY, "token 65"),
        (Changes(), WARM, ""),
    ],
)
def test_what_can_matter_is_named(changes, before, expected):
    assert told(changes, before) == expected


def test_the_end_of_an_output_is_explained_by_its_length():
    assert told(Changes(params={"max_tokens": 9}), GREEDY, ended=True) == "max_tokens=9"


def test_a_greedy_run_that_is_not_lossless_follows_its_drafts():
    assert told(Changes(engine={"drafter": "suffix"}), GREEDY, lossless=False) == "drafter=suffix"


def test_a_fork_changes_coins_outcomes_and_the_final_token_at_its_position_alone() -> None:
    changes = Changes(outcomes={(2, 0): True, (3, 0): False}, coins={(2, 0): 0.25, (2, 9): 0.5}, tokens={2: 8})
    context = Context("r", [5, 6, 7], 2, SamplingParams(temperature=0.7))
    batch = step_batch([(context, Draft.chain([1]), torch.randn(2, 11))], changes)
    assert batch.trees.forced.tolist() == [0, Outcome.ACCEPTED]
    assert (batch.trees.coin[1], batch.trees.final.tolist()) == (0.25, [8])


WIDTHS = st.sampled_from([1, 2, 30, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
SMALLEST, LARGEST = 2.0**-54, 1 - 2.0**-53  # what coins() gives at least and at most


def by_sum(row, coin):
    """(The token at which the whole cumulative sum passes the coin, in float64, the draw's margin)."""
    total = row.double().cumsum(0)
    whole = float(total[-1])
    token = int(torch.searchsorted(total, coin * whole, right=True))
    if token == len(total):
        token = int(row.nonzero()[-1])
    below, above = float(total[token]) - float(row[token]), float(total[token])
    return token, draw_margin(coin, below / whole, above / whole)


@given(st.integers(0, 10_000), WIDTHS, st.sampled_from([0.5, 4.0, 60.0]), st.floats(SMALLEST, LARGEST))
def test_a_draw_is_that_of_the_cumulative_sum(seed, width, spread, coin):
    row = (torch.randn(width, generator=torch.Generator().manual_seed(seed)) * spread).softmax(-1)
    token, prob, margin = Residual(row).draw(coin)
    wanted, far = by_sum(row, coin)
    assert row[token] > 0
    between = row.double()[min(token, wanted) + 1 : max(token, wanted) + 1].sum()
    assert token == wanted or between < 1e-12  # at a border the last digit of a sum decides
    assert prob == pytest.approx(float(row[token]), rel=1e-6)
    assert token != wanted or margin == pytest.approx(far, abs=1e-12)


@given(st.integers(0, 10_000), WIDTHS, st.integers(1, 6))
def test_siblings_are_drawn_without_replacement(seed, width, count):
    """As from distributions of which each drawn token is taken out, until nothing is left."""
    rng = np.random.default_rng(seed)
    rows = rng.random((4, width)) * (rng.random((4, width)) < rng.choice([0.02, 1.0]))
    rows[:, rng.integers(width)] += 1e-3
    rows = torch.tensor(rows / rows.sum(1, keepdims=True), dtype=torch.float32)
    coins = rng.random((4, count))
    for row, draws, own in zip(rows, draw_siblings(rows, coins.tolist()), coins.tolist(), strict=True):
        left = row
        assert len(draws) == min(count, int((row > 0).sum()))
        for draw_, coin in zip(draws, own, strict=False):
            wanted, far = by_sum(left, coin)
            assert draw_.margin == pytest.approx(far, abs=1e-6)
            if far < 1e-6:
                break  # each renormalises in float32, we never do
            assert (draw_.token, draw_.prob) == (wanted, float(row[wanted]))
            assert draw_.low == pytest.approx(float(left.double()[:wanted].sum()), abs=1e-5)
            assert draw_.low <= coin < draw_.low + float(left[wanted]) + 1e-5
            left = left.clone()
            left[wanted] = 0
            left = left / left.sum() if left.sum() else left
