"""What is launched compiles for GPUs that are not here, within their shared memory; a run launches nothing else.

The variants are not written down: they are those that the launchers ask for, on a device of which only the limits are
known. Nothing runs here but Triton's compiler.
"""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from specscope.kernels import launch, tree_attention, tree_verify
from specscope.kernels.tree_batch import DETERMINISTIC, WITHOUT_REPLACEMENT, LayerShape, Part, TreeBatch
from tests.kernels.cases import random_batch, work_of
from tests.kernels.variants import A100, B200, H100, watched

DEVICES = {80: A100, 90: H100, 100: B200}
CPU = torch.device("cpu")


@pytest.fixture(params=[pytest.param(number, marks=() if number == 90 else pytest.mark.slow) for number in DEVICES])
def capability(request, monkeypatch):
    """Launches for this device are seen, and none is made."""
    monkeypatch.setattr(launch, "limits", lambda _: DEVICES[request.param])
    return request.param


def attend(heads, fold, dtype, rows, context, **variant):
    """One sequence."""
    count, size, value = heads
    blocks = range(-(-(context + rows) // 16))
    batch = TreeBatch.build([Part(blocks, context, context + np.arange(rows), np.tri(rows, dtype=np.bool_))], CPU)
    layer = torch.zeros(len(blocks) * 16, count * (size + value), dtype=dtype)
    query = torch.zeros(rows, count * fold, size, dtype=dtype)
    if variant.pop("sinks", False):
        variant["sinks"] = torch.zeros(count * fold, dtype=dtype)
    tree_attention.tree_attention(query, layer, LayerShape(*heads), batch, scale=0.1, **variant)


def check(capability, variants):
    """Every one compiles, and its shared memory is within the device's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = sorted(variants, key=repr)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling"],
        input=json.dumps([(capability, dataclasses.asdict(one)) for one in asked]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    taken = json.loads(done.stdout)
    assert len(taken) == len(asked) > 0
    for one, shared in zip(asked, taken, strict=True):
        assert shared <= DEVICES[capability].shared, one


def test_attention_compiles_within_shared_memory(capability):
    with watched(dry=True) as seen:
        for dtype, size in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 128), (torch.float32, 256)):
            attend((8, size, size), 4, dtype, 64, 5000)  # the largest tile
        attend((8, 128, 128), 4, torch.bfloat16, 1, 5000)
        attend((8, 128, 128), 4, torch.bfloat16, 1, 5)
        attend((2, 64, 64), 8, torch.bfloat16, 25, 5000, window=128, sinks=True)
    assert {"tree_attention._attend", "tree_attention._join"} == {one.kernel for one in seen}
    check(capability, seen)


def test_verification_compiles(capability):
    with watched(dry=True) as seen:
        for drawn in (DETERMINISTIC, WITHOUT_REPLACEMENT):
            tree_verify.tree_verify(*work_of(random_batch(np.random.default_rng(0), 5000, 2, 5, drawn)))
    assert len({one.kernel for one in seen}) == 1
    check(capability, seen)
