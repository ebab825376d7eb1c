"""The engine on the Triton backend gives what it gives on torch's: tokens, verdicts, evidence."""

import numpy as np
import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.kernels.flat_trees import Verdicts
from specscope.live.check_kv import check_kv
from specscope.model.kv_cache import KVCache
from specscope.model.places import Backend, pick_backend
from specscope.speculate.changes import Changes
from specscope.speculate.verify import host
from tests.kernels import DEVICE

PROMPTS = ["abcabcabcab", "the cat sat on the mat, the cat", "x"]
DRAFTERS = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "tree": "3x3", "ngram_min": 1},
    "tree": {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"},
    "forced": {"drafter": "draft_model", "draft_model": "self:2", "tree": "2x2"},
    "dynamic": {"drafter": "draft_model", "draft_model": "self:2", "tree": "dynamic:6,depth=3,top=3"},
}
# Of "forced": at some positions the first child is accepted and the second rejected, at others all are rejected.
FORCED = Changes(
    outcomes={(position, node): node == 0 and position % 3 > 0 for position in range(64) for node in (0, 1)}
)


def engine_of(tiny, backend, name):
    engine = Engine(
        changes=FORCED if name == "forced" else None,
        target=str(tiny),
        dtype="float32",
        kv_memory=0.01,
        backend=backend,
        device=DEVICE.type,
        max_step_tokens=32,
        **DRAFTERS[name],
    )
    assert engine.run_info.backend.startswith(backend)
    return engine


def run(tiny, backend, name, params):
    engine = engine_of(tiny, backend, name)
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
            assert left.verdict.kind == right.verdict.kind
            assert left.verdict.path.tolist() == right.verdict.path.tolist()
            for part in ("outcome", "p", "p_trial", "q_trial", "accept_prob", "residual_mass", "coin"):
                got, wanted = getattr(left.verdict, part), getattr(right.verdict, part)
                assert got.dtype == wanted.dtype
                np.testing.assert_allclose(got, wanted, atol=2e-5, err_msg=part)


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "not moved"])
def test_the_kv_of_an_accepted_path_is_moved_to_its_slots(tiny, monkeypatch, moves):
    """Where it is not, nothing is raised: other tokens' KV lies there."""
    if not moves:
        monkeypatch.setattr(KVCache, "move", lambda self, paths: None)
    engine, moved, differ = engine_of(tiny, "triton", "tree"), 0, False
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True))
    while engine.busy:
        moved += sum(len(part.moved) > 0 for part in engine.step().requests)
        differ |= any(one.differ for name in engine.requests for one in check_kv(engine, name).compared)
    assert moved > 2
    assert differ is not moves


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["forced", "tree"])
def test_a_step_is_judged_on_the_device_alone_and_read_once(tiny, monkeypatch, name):
    """Forced verdicts too."""
    reads = []
    to_host = Verdicts.to_host
    monkeypatch.setattr(Verdicts, "to_host", lambda self: reads.append(1) or to_host(self))
    monkeypatch.setattr(host, "verify", None)
    results = run(tiny, "triton", name, SamplingParams(max_tokens=6, temperature=0.9, ignore_eos=True))
    steps = {step.index for result in results for step in result.steps if step.verdict is not None}
    assert 0 < len(reads) <= 2 * len(steps)  # requests whose prompts differ may be out of step
    assert len(reads) < sum(step.verdict is not None for result in results for step in result.steps)


def test_a_backend_is_chosen_by_device():
    assert pick_backend("auto", torch.device("cpu")) is Backend.TORCH
    assert pick_backend("auto", torch.device("cuda")) is Backend.TRITON
    assert pick_backend("torch", torch.device("cuda")) is Backend.TORCH


def test_triton_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        pick_backend("triton", torch.device("cpu"))
