"""Logits to p: each parameter against a plain reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.speculate.sampling import LogitRows
from specscope.speculate.verify.distribution import Chosen, Residual
from specscope.trace.record.params import SamplingParams

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
