"""`python -m benchmarks gpu`: verify steps of large models with random weights, over the time that their bytes take."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from benchmarks.kernels import need_gpu
from benchmarks.paired import write_figures
from specscope.measure.device import copy_bandwidth, device_info, random_model, seconds
from specscope.model.batch import Segment
from specscope.model.graphs import Capture, CudaCapture, Graphs, Shape
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable
from specscope.model.loader import adopt
from specscope.model.places import Backend
from specscope.model.runner import ModelRunner
from specscope.terminal import text_console
from specscope.trace.record.tree import ROOT, DraftTree

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
}
BATCHES, CONTEXTS, NODES = (1, 8, 32), (1024, 16384), (1, 8, 32, 64)


@dataclass(frozen=True)
class VerifyStep:
    """A verify step of a whole batch."""

    model: str
    batch: int
    context: int
    nodes: int
    seconds: float
    floor: float  # seconds that reading the weights and the KV takes at copy bandwidth

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**self.__dict__, "over_floor": self.seconds / self.floor}


def run_gpu(json_file: str | None) -> None:
    """Measure and print."""
    device, console = need_gpu(), text_console()
    bandwidth = copy_bandwidth(device)
    console.print(f"copying moves {bandwidth / 1e9:,.0f} GB/s", style="dim")
    steps, peers = [], {}
    for name, shape in SHAPES.items():
        model = random_model(shape, torch.bfloat16, device)
        peers[name] = _generate(model, device)
        steps += list(measure(name, model, bandwidth, BATCHES, CONTEXTS, NODES, Backend.TRITON, CudaCapture()))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    table = Table(title=", ".join(device_info(device).values()), title_justify="left", title_style="dim")
    for column in ("model", "batch", "context", "nodes", "ms", "over its bytes' time"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for s in steps:
        figures = (f"{s.seconds * 1e3:.2f}", f"{s.seconds / s.floor:.2f}")
        table.add_row(s.model, str(s.batch), f"{s.context:,}", str(s.nodes), *figures)
    console.print(table)
    for name, took in peers.items():
        console.print(f"{name}: generate() with a static cache, batch 1: {took * 1e3:.2f} ms a token")
    write_figures(
        json_file,
        "gpu",
        {
            "machine": device_info(device),
            "bandwidth": bandwidth,
            "steps": [s.to_dict() for s in steps],
            "generate": peers,
        },
    )


def measure(
    name: str,
    model: Any,  # noqa: ANN401
    bandwidth: float,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    nodes: tuple[int, ...],
    backend: Backend,
    capture: Capture | None = None,
) -> Iterator[VerifyStep]:
    """Forward passes of root and tree for every request; the context's KV is zeros, which cost the same to read.

    `capture`: each pass is captured and replayed, as an engine does.
    """
    loaded = adopt(model, name)
    weights = sum(p.nbytes for p in model.parameters())
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        weights -= model.get_input_embeddings().weight.nbytes  # of which a step reads a few rows
    work = [(b, c, n) for b in batches for c in contexts for n in nodes]
    for batch, context, count in track(work, description=name, transient=True):
        slot = sum(shape.width for shape in loaded.layers) * loaded.dtype.itemsize
        per = -(-(end := context + count + 1) // BLOCK_SIZE)
        if loaded.device.type == "cuda" and batch * per * BLOCK_SIZE * slot > 0.9 * torch.cuda.mem_get_info()[0]:
            continue  # no room for the KV
        runner = ModelRunner(loaded, batch * per, backend=backend)
        tree = DraftTree.build(list(range(count)), [ROOT if i < 8 else i // 8 - 1 for i in range(count)])
        segments = []
        for i in range(batch):
            table = BlockTable(list(range(i * per, (i + 1) * per)))
            segments.append(Segment.of_tree(table, context, [1], tree, logits=True))
        if capture is not None:
            list(runner.graphs.capture(runner.run_batch, [Shape(batch, count + 1)], capture, end, count + 1))
        took = seconds(lambda run=runner, s=segments: run.forward(s), loaded.device)  # type: ignore[misc]
        runner.graphs = Graphs(runner.cache)  # they hold the runner as it holds them: its cache would stay
        yield VerifyStep(name, batch, context, count, took, (weights + batch * context * slot) / bandwidth)


def _generate(model: Any, device: torch.device, tokens: int = 64) -> float:  # noqa: ANN401
    """Seconds a token of generate() with a static cache."""
    prompt = torch.ones(1, 1024, dtype=torch.int64, device=device)
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "cache_implementation": "static"}
    run = lambda n: model.generate(prompt, max_new_tokens=n, **how)  # noqa: E731
    return (seconds(lambda: run(tokens + 1), device, 3) - seconds(lambda: run(1), device, 3)) / tokens
