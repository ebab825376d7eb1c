"""Captured passes give what passes give: the same tokens and verdicts, whatever the shape that a batch is padded to.

Without a GPU a pass is "captured" by keeping it as it is, its tensors where they were: it runs again on what they hold.
What this cannot show is CUDA's own part; what it does show is that nothing of a batch but those tensors decides.
"""

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from specscope.engine.build import capture_graphs
from specscope.model.graphs import CudaCapture
from tests.analyze.audit.runs import Bench
from tests.kernels import DEVICE

PROMPTS = ["abcabcabcab", "the cat sat"]
ROWS = {  # by the name of an engine: its tree, and a temperature
    "none": (None, 0.9),
    "ngram": ("2x3", 0.0),
    "dynamic model": ("dynamic:3,depth=2,top=2", 0.9),
    "eagle dynamic": ("dynamic:3,depth=2,top=2", 0.0),
    "eagle": ("[(0,), (1,), (1, 0)]", 0.9),
    "mtp": ("[(0,), (1,), (1, 0)]", 0.9),
    "p-eagle dynamic": ("dynamic:3,depth=2,top=2", 0.0),
    "dflash": ("3", 0.9),
}


@torch.inference_mode()
def keep(run):
    """A capture without a GPU."""
    outputs = run()

    def again():
        for old, new in zip(outputs, run(), strict=True):
            old.copy_(new)

    return outputs, torch.inference_mode()(again)


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    how = {"backend": "triton", "graphs": "off", "device": DEVICE.type, "max_context": 200}
    return Bench(deep, tmp_path_factory.mktemp("heads"), **how, max_batch=2, max_step_tokens=32)


def capture(engine):
    make_capture = CudaCapture if DEVICE.type == "cuda" else lambda: keep
    said = []
    text = capture_graphs(engine.config, engine.runner, engine.drafter, engine.max_context, make_capture, said.append)
    return text, said


def watch_replays(graphs):
    """Of each pass, whether some shape fits and is replayed."""
    used, replay = [], graphs.replay
    graphs.replay = lambda *given: (done := replay(*given), used.append(done is not None))[0]
    return used


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ngram" else pytest.mark.slow) for name in ROWS]
)
def test_a_captured_engine_gives_the_same(bench, name):
    tree, temperature = ROWS[name]
    params = SamplingParams(max_tokens=7, temperature=temperature, seed=3, ignore_eos=True)
    plain, graphed = (bench.fresh(name, tree=tree) for _ in range(2))
    text, said = capture(graphed)
    count = len(said)
    assert text == f"{count} CUDA graphs"
    assert said[-1] == f"capturing CUDA graphs: {count} of {count}"
    used = watch_replays(graphed.runner.graphs)
    drafted = watch_replays(graphed.drafter.runner.graphs) if graphed.drafter.runner is not None else [True] * 3
    ours, reference = graphed.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert used.count(True) > 2  # decode steps; prompts are longer than any shape
    assert used.count(False) > 0
    assert drafted.count(True) > 2
    assert [r.token_ids for r in ours] == [r.token_ids for r in reference]
    for a, b in zip(ours, reference, strict=True):
        for left, right in zip(a.steps, b.steps, strict=True):
            if right.verdict is None:
                assert left.verdict is None
                continue
            assert left.verdict.path.tolist() == right.verdict.path.tolist()
            np.testing.assert_allclose(left.verdict.p, right.verdict.p, atol=2e-5)
            assert left.tree.token.tolist() == right.tree.token.tolist()
    assert graphed.runner.cache.pool.used == 0


def test_a_model_that_cannot_be_captured_runs_without(bench):
    engine = bench.fresh("none")

    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    args = (engine.config, engine.runner, engine.drafter, engine.max_context, lambda: refuse, lambda _: None)
    text = "0 CUDA graphs; the target could not be captured: operation not permitted when stream is capturing"
    assert capture_graphs(*args) == text
    assert not len(engine.runner.graphs)
    assert len(engine.generate(["ab"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
