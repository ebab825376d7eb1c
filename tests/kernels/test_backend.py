"""The engine on the Triton backend gives what it gives on torch's: tokens, verdicts, evidence."""

import numpy as np
import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.model.places import Backend, pick_backend
from specscope.speculate.changes import Changes
from tests.kernels import DEVICE
from tests.mtp import with_modules

PROMPTS = ["abcabcabcab", "the cat sat on the mat, the cat", "x"]
DRAFTERS = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "tree": "3x3", "ngram_min": 1},
    "tree": {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"},
    "forced": {"drafter": "draft_model", "draft_model": "self:2", "tree": "2x2"},
    "dynamic": {"drafter": "draft_model", "draft_model": "self:2", "tree": "dynamic:6,depth=3,top=3"},
    "module": {"drafter": "mtp", "tree": "[(0,), (1,), (0, 0)]"},
    "modules": {"drafter": "mtp", "tree": "2"},
}
# Of "forced": at some positions the first child is accepted and the second rejected, at others all are rejected.
FORCED = Changes(
    outcomes={(position, node): node == 0 and position % 3 > 0 for position in range(64) for node in (0, 1)}
)


def run(tiny, backend, name, params):
    engine = Engine(
        changes=FORCED if name == "forced" else None,
        target=str(with_modules(tiny, 2) if DRAFTERS[name]["drafter"] == "mtp" else tiny),
        dtype="float32",
        kv_memory=0.01,
        backend=backend,
        device=DEVICE.type,
        max_step_tokens=32,
        **DRAFTERS[name],
    )
    assert engine.run_info.backend.startswith(backend)
    results = engine.generate(PROMPTS, params)
    assert engine.runner.cache.pool.used == 0
    return results


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("temperature", "name"),
    [
        pytest.param(t, name, marks=pytest.mark.slow if (t, name) in ((0.9, "dynamic"), (0.0, "tree")) else ())
        for t in (0.0, 0.9)
        for name in DRAFTERS
    ],
)
def test_both_backends_make_the_same_of_a_batch(tiny, name, temperature):
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=3, ignore_eos=True)
    ours, reference = (run(tiny, backend, name, params) for backend in ("triton", "torch"))
    assert [r.token_ids for r in ours] == [r.token_ids for r in reference]
    for a, b in zip(ours, reference, strict=True):
        for left, right in zip(a.steps, b.steps, strict=True):
            assert (left.verdict is None) == (right.verdict is None)
            if left.verdict is None:
                continue
            assert (left.verdict.kind, left.verdict.path.tolist()) == (right.verdict.kind, right.verdict.path.tolist())
            for part in ("outcome", "p", "p_trial", "q_trial", "accept_prob", "residual_mass", "coin"):
                got, wanted = getattr(left.verdict, part), getattr(right.verdict, part)
                assert got.dtype == wanted.dtype
                np.testing.assert_allclose(got, wanted, atol=2e-5, err_msg=part)


def test_a_backend_is_chosen_by_device():
    assert pick_backend("auto", torch.device("cpu")) is Backend.TORCH
    assert pick_backend("auto", torch.device("cuda")) is Backend.TRITON
    assert pick_backend("torch", torch.device("cuda")) is Backend.TORCH


def test_triton_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        pick_backend("triton", torch.device("cpu"))
