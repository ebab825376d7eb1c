"""Captured passes give what passes give: the same tokens and verdicts, whatever the shape that a batch is padded to.

Without a GPU a pass is "captured" by keeping it as it is, its tensors where they were: it runs again on what they hold.
What this cannot show is CUDA's own part; what it does show is that nothing of a batch but those tensors decides.
"""

import numpy as np
import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.engine.build import capture_graphs
from specscope.engine.config import EngineConfig
from specscope.model.batch import Segment
from specscope.model.graphs import CudaCapture
from specscope.model.kv_cache import BlockTable
from specscope.trace.record.tree import DraftTree
from tests.dflash import write_dflash
from tests.heads import head_tensors, write_head, write_parallel_head
from tests.kernels import DEVICE
from tests.mtp import with_modules

PROMPTS = ["abcabcabcab", "the cat sat"]
DRAFTERS = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "tree": "2x3", "ngram_min": 1},
    "draft_model": {"drafter": "draft_model", "draft_model": "self:2", "tree": "dynamic:3,depth=2,top=2"},
    "eagle": {"drafter": "eagle", "tree": "dynamic:3,depth=2,top=2"},
    "eagle tree": {"drafter": "eagle", "tree": "[(0,), (1,), (1, 0)]"},
    "mtp": {"drafter": "mtp", "tree": "[(0,), (1,), (1, 0)]"},
    "eagle in one pass": {"drafter": "eagle", "tree": "dynamic:3,depth=2,top=2", "draft_model": "parallel"},
    "dflash": {"drafter": "dflash", "tree": "3", "draft_model": "block"},
}


@torch.inference_mode()
def keep(run):
    """A capture without a GPU."""
    outputs = run()

    def again():
        for old, new in zip(outputs, run(), strict=True):
            old.copy_(new)

    return outputs, torch.inference_mode()(again)


def engine_of(model, head, how):
    if how["drafter"] in ("eagle", "dflash"):
        how = {**how, "draft_model": str(head / how.get("draft_model", "eagle"))}
    config = EngineConfig(
        target=str(with_modules(model) if how["drafter"] == "mtp" else model),
        dtype="float32",
        kv_memory=0.01,
        backend="triton",
        graphs="off",
        device=DEVICE.type,
        max_context=200,
        max_batch=2,
        max_step_tokens=32,
        **how,
    )
    return Engine(config)


@pytest.fixture(scope="module")
def head(deep, tmp_path_factory):
    """The folder of an EAGLE-3 head, of a P-EAGLE head and of a DFlash head."""
    folder = tmp_path_factory.mktemp("head")
    write_head(folder / "eagle", head_tensors())
    write_parallel_head(folder / "parallel")
    write_dflash(folder / "block")
    return folder


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
    ("name", "temperature"),
    [
        pytest.param(name, temperature, marks=() if name == "ngram" else pytest.mark.slow)
        for name, temperature in zip(DRAFTERS, (0.9, 0.0, 0.9, 0.0, 0.9, 0.9, 0.0, 0.9), strict=True)
    ],
)
def test_a_captured_engine_gives_the_same(tiny, deep, head, name, temperature):
    params = SamplingParams(max_tokens=7, temperature=temperature, seed=3, ignore_eos=True)
    model = deep if name.startswith(("eagle", "dflash")) else tiny
    plain, graphed = (engine_of(model, head, DRAFTERS[name]) for _ in range(2))
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


def fresh_table(engine):
    table = BlockTable()
    engine.runner.cache.reserve(table, 16, 0)
    return table


def segment_of(table, tokens):
    return Segment.of_tree(table, 0, tokens, DraftTree.empty(), logits=True)


def test_a_model_that_cannot_be_captured_runs_without(tiny, head):
    engine = engine_of(tiny, head, DRAFTERS["none"])

    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    args = (engine.config, engine.runner, engine.drafter, engine.max_context, lambda: refuse, lambda _: None)
    text = "0 CUDA graphs; the target could not be captured: operation not permitted when stream is capturing"
    assert capture_graphs(*args) == text
    assert not len(engine.runner.graphs)
    assert len(engine.generate(["ab"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
