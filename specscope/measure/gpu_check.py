"""`specscope doctor --gpu`: every kernel on the device against torch on the host, a captured graph, its memory.

The first thing to run on a machine with a GPU. Tests run the same code on a CPU under Triton's interpreter, in small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.engine.engine import Engine
from specscope.kernels import launch, tree_attention, tree_verify
from specscope.kernels.tree_batch import FlatTrees, TreeBatch
from specscope.measure.device import copy_bandwidth, random_model
from specscope.model.attention import Variant, paged_attention
from specscope.model.batch import Batch, Segment
from specscope.model.graphs import CudaCapture, Outputs, Shape
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache, LayerShape
from specscope.model.loader import adopt
from specscope.model.places import Backend
from specscope.model.runner import ModelRunner
from specscope.speculate.sampling import TargetRows
from specscope.speculate.verify import host
from specscope.speculate.verify.batch import VerifyBatch, judged_tree
from specscope.speculate.verify.verifier import on_device
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import ROOT, DraftTree, Drawn

BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest number: rounding alone


@dataclass(frozen=True)
class GpuCheck:
    """One check on the device."""

    name: str
    good: bool
    text: str


@dataclass(frozen=True)
class Sizes:
    """The sizes of the work: on a GPU large enough that contexts and the vocabulary are split."""

    context: int = 4000
    vocabulary: int = 131072
    copied: int = 1 << 30
    heads: int = 8
    size: int = 128
    half: bool = True  # bfloat16 and float16 as well
    block: int = tree_verify.BLOCK


FULL = Sizes()
SMALL = Sizes(context=40, vocabulary=70, copied=1 << 16, heads=1, size=16, half=False, block=16)


def check_gpu(device: torch.device, sizes: Sizes, target: str | None = None) -> Iterator[GpuCheck]:
    """Try everything, one after another. `target`: what the engine runs, else the default model."""
    limits = launch.limits(device)
    yield GpuCheck("limits", True, f"{limits.multiprocessors} multiprocessors, {limits.shared >> 10} KiB shared memory")
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if sizes.half else (torch.float32,):
        for name, nodes, splits in (("chunk", 0, 1), ("trees", 12, 1), ("trees, split", 12, 3)):
            label = f"tree_attention {str(dtype).removeprefix('torch.')}, {name}"
            yield _try(label, _attention, device, sizes, dtype, nodes, splits)
    for drawn, how in ((Drawn.DETERMINISTIC, "deterministic"), (Drawn.WITHOUT_REPLACEMENT, "sampled")):
        yield _try(f"tree_verify {how}", _verify, device, sizes, drawn)
    yield _try("graph", _graph, device)
    yield _try("engine", _engine, device, target)
    yield _try("copy bandwidth", lambda: f"{copy_bandwidth(device, sizes.copied) / 1e9:,.1f} GB/s read and written")


def _try(name: str, work: Callable[..., str], *given: Any) -> GpuCheck:  # noqa: ANN401
    try:
        return GpuCheck(name, True, work(*given))
    except Exception as error:  # whatever a compiler or a driver raises is the result of the check
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return GpuCheck(name, False, reason)


def _near(got: Tensor, wanted: Tensor, bound: float) -> str:
    """The largest difference in words. Raises ArithmeticError where it is more than rounding, or no number."""
    a, b = got.detach().cpu().double(), wanted.detach().cpu().double()
    off = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3)
    if not off <= bound:
        raise ArithmeticError(f"off by {off:.2g} of the largest number; rounding explains {bound:.2g}")
    return f"off by {off:.1g} of the largest number at most"


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def _attention(device: torch.device, sizes: Sizes, dtype: torch.dtype, nodes: int, splits: int) -> str:
    """Two sequences, each a chunk of 40 rows or a root with a tree; their blocks are out of order."""
    tree, pending = DraftTree.build(range(nodes), [ROOT] * nodes), 1 if nodes else 40
    per = -(-(sizes.context + pending + nodes) // BLOCK_SIZE)
    blocks = np.random.default_rng(0).permutation(2 * per)
    tables = [BlockTable(blocks[i::2].tolist()) for i in range(2)]
    segments = [Segment.of_tree(table, sizes.context, [0] * pending, tree, logits=True) for table in tables]
    shape, scale, cpu = LayerShape(sizes.heads, sizes.size, sizes.size), sizes.size**-0.5, torch.device("cpu")
    query = _random(device, dtype, 2 * (pending + nodes), 4 * sizes.heads, sizes.size)
    rows = _random(device, dtype, 2 * per * BLOCK_SIZE, shape.width)
    batch = TreeBatch.build([segment.part for segment in segments], device)
    got = tree_attention.tree_attention(query, rows, shape, batch, scale=scale, splits=splits)
    cache, variant = KVCache([shape], 2 * per, torch.float64, cpu), Variant(scale, None, None, None)
    cache.write_rows(0, torch.arange(len(rows)), rows.cpu().double())
    wanted = paged_attention(query.cpu().double(), 0, cache, Batch.build(segments, cpu), variant)
    return _near(got, wanted, BOUND[dtype])


def _verify(device: torch.device, sizes: Sizes, drawn: Drawn) -> str:
    """Four trees of eight siblings with a child each; every decision must be the host's."""
    generator, nodes, trees, q_rows = np.random.default_rng(7), 16, [], list[Tensor]()
    p, q = (_random(device, torch.float32, n, sizes.vocabulary).softmax(-1) for n in (4 * (nodes + 1), 36))
    for i in range(4):
        token = generator.choice(sizes.vocabulary, nodes, replace=False)
        tree = DraftTree.build(token.tolist(), [ROOT] * 8 + list(range(8)), drawn=drawn)
        rows = {} if drawn == Drawn.DETERMINISTIC else {node: q[i * 9 + 1 + node] for node in range(ROOT, 8)}
        trees.append(judged_tree(tree, rows, generator.random(nodes + 1), q_rows))
    batch = VerifyBatch(FlatTrees.build(trees), TargetRows(q.new_zeros(0, dtype=torch.int64), p), q_rows)
    both = on_device(batch, sizes.block), host.verify(batch.on_host())[0]
    got, wanted = (np.concatenate([(*one.outcome, one.token, one.kind) for one in verdicts]) for verdicts in both)
    if not np.array_equal(got, wanted):
        raise ArithmeticError("a different verdict from the host's")
    names = ("p", "p_trial", "q_trial", "accept_prob", "residual_mass")
    ours, theirs = (np.concatenate([getattr(one, name) for one in verdicts for name in names]) for verdicts in both)
    return _near(torch.from_numpy(ours), torch.from_numpy(theirs), 2e-5)


def _graph(device: torch.device) -> str:
    """A small model's pass over two trees, captured and replayed: its logits must be those without a graph."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    heads = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    model = adopt(random_model(shape | heads, torch.float32, device), "a small model")
    runner = ModelRunner(model, 16, backend=Backend.TRITON)
    segments = []
    for start in (3, 20):
        table = BlockTable()
        runner.cache.reserve(table, 8, 0)
        tree = DraftTree.build([start + 1, start + 2], [ROOT, ROOT])
        segments.append(Segment.of_tree(table, 0, [start], tree, logits=True))
    plain = torch.cat(runner.forward(segments))
    capture = CudaCapture() if device.type == "cuda" else _keep
    list(runner.graphs.capture(runner.run_batch, [Shape(2, 4)], capture, 64, 8))
    if runner.graphs.replay(segments) is None:
        raise ArithmeticError("the captured shape did not take the batch")
    return "captured and replayed, " + _near(torch.cat(runner.forward(segments)), plain, 1e-5)


@torch.inference_mode()
def _keep(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """A substitute for a captured graph without a GPU: the pass is run again."""
    outputs = run()

    @torch.inference_mode()
    def again() -> None:
        for old, new in zip(outputs, run(), strict=True):
            old.copy_(new)

    return outputs, again


def _engine(device: torch.device, target: str | None) -> str:
    """Generate a few tokens with an engine as it would be started here; returns the backend that ran."""
    engine = Engine(target=target, device=device.type, backend="triton", drafter="ngram", kv_memory=0.05)
    engine.generate(["1, 2, 3, 1, 2, 3, 1, 2,"], SamplingParams(max_tokens=8, ignore_eos=True))
    ran_by = engine.run_info.backend
    if "could not be" in ran_by:
        raise RuntimeError(ran_by)
    return ran_by
