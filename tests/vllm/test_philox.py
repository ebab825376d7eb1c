"""The coins of vLLM's V2 runner, against Triton itself; tests/conftest.py has it interpreted where there is no GPU."""

import numpy as np
import torch
import triton
import triton.language as tl

from specscope.trace.inside.chain import of_step, uniform


@triton.jit
def toss(seeds, positions, steps, out):
    at = tl.program_id(0)
    seed = tl.load(seeds + at) ^ (tl.cast(tl.load(steps + at), tl.int64) << 32)  # vLLM's spec_step_seed
    tl.store(out + at, tl.maximum(tl.rand(seed, tl.load(positions + at)), 4.6566127342e-10))


def test_coins_are_tritons():
    rng = np.random.default_rng(0)
    seeds = np.concatenate([[0, 7, 42, -1, 2**62], rng.integers(-(2**63), 2**63 - 1, 200)]).astype(np.int64)
    positions = rng.integers(0, 200_000, len(seeds))
    steps = np.arange(len(seeds)) % 5
    out = torch.empty(len(seeds), dtype=torch.float32)
    toss[(len(seeds),)](*(torch.from_numpy(one) for one in (seeds, positions, steps)), out)
    np.testing.assert_array_equal(uniform(of_step(seeds, steps), positions), out.numpy())
    assert (of_step(seeds, steps)[steps == 0] == seeds[steps == 0]).all()
    assert ((out > 0) & (out <= 1)).all()
