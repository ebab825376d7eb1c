"""The GPU benchmarks run without a GPU, in small, so that they do not break unseen; otherwise they are refused."""

import json

import pytest
import torch

from benchmarks.gpu import SHAPES, measure, random_model
from benchmarks.kernels import Measured, Work, need_gpu, run_kernels
from specscope.errors import UserError
from specscope.measure import device as device_module
from specscope.model.places import Backend

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 70, "head_dim": 16}


@pytest.fixture(autouse=True)
def once(monkeypatch):
    monkeypatch.setattr(device_module, "REPEATS", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_estimated():
    with pytest.raises(UserError, match="no CUDA GPU here"):
        need_gpu()


@pytest.mark.slow
def test_every_kernel_is_measured(tmp_path):
    work = Work(batch=2, heads=1, fold=2, size=16, vocabulary=64, dtype=torch.float32)
    run_kernels(str(tmp_path / "k.json"), work, CPU)
    rows = json.loads((tmp_path / "k.json").read_text())["kernels"]
    names = {row["name"].split(",")[0] for row in rows}
    assert names == {"tree_attention", "SDPA", "tree_verify"}
    assert all(row["us"] > 0 and row["bytes"] > 0 for row in rows)


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_of_every_shape_is_measured(name):
    shape = SHAPES[name] | SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = random_model(shape, torch.float32, CPU)
    steps = list(measure(name, model, 1e9, (1, 2), (20,), (1, 8), Backend.TORCH))
    assert [(s.batch, s.nodes) for s in steps] == [(1, 1), (1, 8), (2, 1), (2, 8)]
    assert all(s.seconds > 0 and s.floor > 0 for s in steps)


def test_share_is_of_the_bandwidth():
    assert Measured("x", seconds=2e-6, bytes=1000, bandwidth=1e9).share == pytest.approx(0.5)
