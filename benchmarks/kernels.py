"""`python -m benchmarks kernels`: each kernel against the bytes that it must move, attention against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.paired import write_figures
from specscope.errors import UserError
from specscope.kernels import tree_attention, tree_batch, tree_verify
from specscope.kernels.tree_batch import NOBODY, FlatTrees, LayerShape, Part, Tree, TreeBatch
from specscope.measure.device import copy_bandwidth, device_info, seconds
from specscope.terminal import text_console

BLOCK, REJECTED, WITHOUT_REPLACEMENT = 16, tree_batch.REJECTED, tree_batch.WITHOUT_REPLACEMENT


@dataclass(frozen=True)
class Work:
    """The sizes of a batch."""

    batch: int = 8
    heads: int = 8
    fold: int = 4
    size: int = 128
    vocabulary: int = 131072
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Measured:
    """One piece of work: the time it took, and the bytes that it has to move."""

    name: str
    seconds: float
    bytes: int
    bandwidth: float

    @property
    def share(self) -> float:
        """The share of the copy bandwidth that was reached."""
        return self.bytes / self.seconds / self.bandwidth

    def to_dict(self) -> dict[str, float | str]:
        """Plain values."""
        return {"name": self.name, "us": self.seconds * 1e6, "bytes": self.bytes, "share": self.share}


def need_gpu() -> torch.device:
    """The CUDA device. Raises UserError where there is none: figures are measured, never estimated."""
    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU here: this benchmark needs one (python -m benchmarks cpu measures without)")
    return torch.device("cuda")


def run_kernels(json_file: str | None, work: Work | None = None, device: torch.device | None = None) -> None:
    """Measure and print."""
    device, work, console = device or need_gpu(), work or Work(), text_console()
    bandwidth = copy_bandwidth(device, 1 << (30 if device.type == "cuda" else 20))
    console.print(f"copying moves {bandwidth / 1e9:,.0f} GB/s", style="dim")
    rows = list(measure(work, device, bandwidth))
    table = Table(title=", ".join(device_info(device).values()), title_justify="left", title_style="dim")
    for column in ("", "us", "share of copy bandwidth"):
        table.add_column(column, justify="left" if column == "" else "right")
    for row in rows:
        table.add_row(row.name, f"{row.seconds * 1e6:,.1f}", f"{row.share:.2f}")
    console.print(table)
    kernels = [row.to_dict() for row in rows]
    write_figures(json_file, "kernels", {"machine": device_info(device), "bandwidth": bandwidth, "kernels": kernels})


def measure(work: Work, device: torch.device, bandwidth: float) -> Iterator[Measured]:
    """Every kernel at the sizes that matter."""

    def took(name: str, size: int, call: Callable[[], object]) -> Measured:
        return Measured(name, seconds(call, device), size, bandwidth)

    contexts = (1024, 16384) if device.type == "cuda" else (64,)
    for context in contexts:
        for nodes in (0, 8, 32, 64):
            yield from _attention(work, context, nodes, device, took)
    yield from _verification(work, device, took)


Took = Callable[[str, int, Callable[[], object]], Measured]


def _attention(work: Work, context: int, nodes: int, device: torch.device, took: Took) -> Iterator[Measured]:
    """The kernel, SDPA with a mask over keys gathered beforehand, and FlexAttention likewise."""
    fed = 1 + nodes
    per = -(-(context + fed) // BLOCK)
    mask = np.eye(fed, dtype=np.bool_)
    mask[:, 0] = True
    parts = [
        Part(range(i * per, (i + 1) * per), context, context + np.minimum(np.arange(fed), 1), mask)
        for i in range(work.batch)
    ]
    batch = TreeBatch.build(parts, device)
    heads = LayerShape(work.heads, work.size, work.size)
    rows = torch.randn(work.batch * per * BLOCK, 2 * work.heads * work.size, device=device).to(work.dtype)
    query = torch.randn(work.batch * fed, work.heads * work.fold, work.size, device=device).to(work.dtype)
    size = work.batch * (context + fed) * rows[0].nbytes + 2 * query.nbytes  # each key and value once
    scale = work.size**-0.5
    name = f"{context:,} of context, {nodes} nodes"
    ours = lambda: tree_attention.tree_attention(query, rows, heads, batch, scale=scale)  # noqa: E731
    yield took(f"tree_attention, {name}", size, ours)
    length = context + fed
    dense = rows.view(work.batch, per * BLOCK, 2, work.heads, work.size)[:, :length].permute(2, 0, 3, 1, 4).contiguous()
    key, value = dense[0], dense[1]
    q = query.view(work.batch, fed, -1, work.size).transpose(1, 2).contiguous()
    seen = torch.ones(fed, length, dtype=torch.bool, device=device)
    seen[:, context:] = torch.from_numpy(mask).to(device)
    bias = torch.zeros(fed, length, dtype=work.dtype, device=device).masked_fill(~seen, -torch.inf)
    yield took(
        f"SDPA, {name}",
        size,
        lambda: functional.scaled_dot_product_attention(q, key, value, attn_mask=bias, enable_gqa=True),
    )
    if device.type == "cuda":
        yield took(f"FlexAttention, {name}", size, _flex(q, key, value, seen, device))


def _flex(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, device: torch.device) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    block_mask = create_block_mask(
        lambda b, h, row, slot: seen[row, slot], None, None, query.shape[2], key.shape[2], device=str(device)
    )
    return lambda: compiled(query, key, value, block_mask=block_mask, enable_gqa=True)


def _verification(work: Work, device: torch.device, took: Took) -> Iterator[Measured]:
    """Trees of 64 nodes, eight siblings a node, sampled without replacement."""
    nodes, generator = 64, np.random.default_rng(0)
    parent = np.array([i // 8 - 1 for i in range(nodes)], dtype=np.int32)
    logits = torch.randn(work.batch * (nodes + 1), work.vocabulary, device=device)
    p, q = ((x / 0.8).softmax(-1) for x in (logits, logits.roll(1, 0)))
    trees = []
    for i in range(work.batch):
        q_row = np.full(nodes + 1, NOBODY)
        q_row[:9] = i * (nodes + 1) + np.arange(9)
        token = generator.choice(work.vocabulary, nodes, replace=False).astype(np.int32)
        trees.append(
            Tree(token, parent, np.full(nodes, WITHOUT_REPLACEMENT, np.uint8), generator.random(nodes + 1), q_row)
        )
    flat, choices = FlatTrees.build(trees), torch.zeros(0, dtype=torch.int64, device=device)
    arguments = flat.on(device), p, choices, q
    read = tree_verify.tree_verify(*arguments).to_host()
    parents = np.unique(flat.parent[read["outcome"] == REJECTED])  # there a pass needs a row of p and one of q
    passes = 2 * len(parents) + int((read["recovered"] == 0).sum())
    yield took("tree_verify, 64 nodes each", passes * p[0].nbytes, lambda: tree_verify.tree_verify(*arguments))
