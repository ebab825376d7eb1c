"""The engine on the Triton backend gives what it gives on torch's: tokens, verdicts, evidence."""

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from specscope.errors import UserError
from specscope.model.places import Backend, pick_backend
from specscope.speculate.changes import Changes
from tests.analyze.audit.runs import Bench
from tests.kernels import DEVICE

PROMPTS = ["abcabcabcab", "the cat sat on the mat, the cat", "x"]
DRAFTERS = {  # by the name of a row: that of its engine, and its tree
    "ngram": ("ngram", "3x3"),
    "tree": ("draft tree", "[(0,), (1,), (0, 0), (1, 0)]"),
    "forced": ("draft tree", "2x2"),
    "dynamic": ("draft tree", "dynamic:6,depth=3,top=3"),
    "module": ("mtp", "[(0,), (1,), (0, 0)]"),
    "modules": ("mtp-3", "3"),
}
# Of "forced": at some positions the first child is accepted and the second rejected, at others all are rejected.
FORCED = Changes(
    outcomes={(position, node): node == 0 and position % 3 > 0 for position in range(64) for node in (0, 1)}
)


@pytest.fixture(scope="module")
def bench(tiny, tmp_path_factory):
    return Bench(tiny, tmp_path_factory.mktemp("heads"), device=DEVICE.type, max_step_tokens=32)


def run(bench, backend, name, params):
    drafter, tree = DRAFTERS[name]
    engine = bench.fresh(drafter, tree=tree, backend=backend, changes=FORCED if name == "forced" else None)
    assert engine.run_info.backend.startswith(backend)
    results = engine.generate(PROMPTS, params)
    assert engine.runner.cache.pool.used == 0
    return results


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, t, marks=() if (name, t) in (("tree", 0.9), ("dynamic", 0.0)) else pytest.mark.slow)
        for name in DRAFTERS
        for t in (0.0, 0.9)
    ],
)
def test_both_backends_make_the_same_of_a_batch(bench, name, temperature):
    params = SamplingParams(max_tokens=5, temperature=temperature, seed=3, ignore_eos=True)
    ours, reference = (run(bench, backend, name, params) for backend in ("triton", "torch"))
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
