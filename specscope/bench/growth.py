"""`specscope bench growth`: how time grows with size, and the exponent of the curve.

To measure another thing, add a Curve to `curves`: a name, what its sizes count, the sizes, and a function that takes a
size and gives seconds (`best` times a piece of work).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import track
from rich.table import Table
from rich.text import Text

from specscope.bench.curves import Curve, best, exponent, measure
from specscope.bench.growth_debug import debug_curves
from specscope.bench.paired import machine_info, write_figures
from specscope.model.attention import Variant, paged_attention
from specscope.model.batch import Batch, Segment
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache, LayerShape
from specscope.speculate.drafters.base import Context
from specscope.speculate.drafters.ngram import NgramDrafter
from specscope.speculate.sampling import shaped
from specscope.speculate.tokens import Tokens
from specscope.terminal import text_console
from specscope.trace.params import SamplingParams
from specscope.trace.tree import DraftTree

VOCABULARY = 49152
HEADS, KV_HEADS, SIZE = 9, 3, 64  # of the default target's attention
SHORT = 64  # tokens of a short request
ROWS = 16  # nodes and root of a tree


def curves() -> list[Curve]:
    """All that is measured."""
    contexts = (1024, 4096, 16384, 65536)
    cached = (512, 1024, 2048, 4096)  # what a processor's caches hold; longer ones also measure its memory
    return [
        Curve("attention, a long request and seven short ones", "tokens of the long", cached, _beside),
        Curve("attention, short requests beside one of 4,096", "short requests", (4, 8, 16, 32), _among),
        Curve("penalties of a tree's rows", "tokens of context", contexts, _penalties),
        Curve("n-gram, a step in a text", "tokens of context", contexts, _ngram_text, 0.5),
        Curve("n-gram, a step in repetitions", "tokens of context", contexts, _ngram_loop, 0.5),
        Curve("n-gram, the first step of a prompt", "tokens of context", contexts[1:], _ngram_prompt, 1.5),
        *debug_curves(),
    ]


def run_growth(json_file: str | None, wanted: Sequence[Curve] | None = None) -> None:
    """Measure every curve and print it, with the exponent fitted to it."""
    console, rows = text_console(), list[dict[str, Any]]()
    table = Table(title="milliseconds by size", title_justify="left", title_style="dim")
    for column in ("", "", "exponent", "wanted, at most"):
        table.add_column(column, justify="right" if column else "left")
    for curve in track(curves() if wanted is None else wanted, "measuring", console=console, transient=True):
        seconds = measure(curve)
        fitted = exponent(curve.sizes, seconds)
        points = [f"{size:,}: {s * 1e3:.3f}" for size, s in zip(curve.sizes, seconds, strict=True)]
        style = "" if fitted <= curve.most else "yellow"
        table.add_row(
            Text(f"{curve.name}\n").append(f"by {curve.unit}", style="dim"),
            "\n".join(points),
            f"{fitted:.2f}",
            f"{curve.most}",
            style=style,
        )
        rows.append({"name": curve.name, "unit": curve.unit, "sizes": list(curve.sizes), "seconds": seconds})
        rows[-1] |= {"exponent": fitted, "wanted": curve.most}
    console.print(table)
    machine = machine_info("float32", torch.get_num_threads())
    write_figures(json_file, "growth", {"machine": machine, "curves": rows})


# Attention


def _beside(long: int) -> float:
    return _attention([long] + [SHORT] * 7)


def _among(count: int) -> float:
    return _attention([4096] + [SHORT] * count)


def _attention(lengths: Sequence[int]) -> float:
    """One layer's attention of a decoding step, over blocks that lie anywhere; with the layout, as for 30 layers."""
    blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
    free = random.Random(0).sample(range(blocks), blocks)
    cache = KVCache([LayerShape(KV_HEADS, SIZE, SIZE)], blocks, torch.float32, torch.device("cpu"))
    segments = []
    for length in lengths:
        table = BlockTable([free.pop() for _ in range(-(-length // BLOCK_SIZE))])
        segments.append(Segment.of_tree(table, length - 1, [0], DraftTree.empty(), logits=True))
    query = torch.zeros(len(lengths), HEADS, SIZE)
    variant = Variant(SIZE**-0.5, None, None, None)
    batch = Batch.build(segments, torch.device("cpu"))
    with torch.inference_mode():
        layer = best(lambda: paged_attention(query, 0, cache, batch, variant))
    return layer + best(lambda: Batch.build(segments, torch.device("cpu"))) / 30


# Penalties and n-grams


def _text(length: int) -> list[int]:
    """Tokens that come about as often as words do: few of them often, most of them once or never."""
    drawn = np.random.default_rng(0).zipf(1.2, size=2 * length)
    return [int(token) for token in drawn[drawn < VOCABULARY][:length]]


def _penalties(length: int) -> float:
    """A token more, then the logits of a tree's rows."""
    text, logits = Tokens([1], _text(length)), torch.zeros(ROWS, VOCABULARY)
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
    context = Context("r", text, 1, params)
    paths = [list(range(row % 5)) for row in range(ROWS)]
    shaped(logits, params, context.counts, paths)

    def step() -> None:
        text.append(7)
        shaped(logits, params, context.counts, paths)

    return best(step)


def _ngram_text(length: int) -> float:
    return _ngram(_text(length))


def _ngram_loop(length: int) -> float:
    return _ngram([1, 2, 3, 4, 5] * (length // 5))


def _ngram(tokens: list[int]) -> float:
    """Two tokens more, then a tree of what followed the last ones before; the mean of some steps."""
    drafter, after, steps = NgramDrafter(depth=5, width=3), iter(tokens[:1000] * 2), 20
    context = Context("r", tokens, 1, SamplingParams())
    drafter.propose([context])

    def step() -> None:
        for _ in range(steps):
            tokens.extend((next(after), next(after)))
            drafter.propose([context])

    return best(step) / steps


def _ngram_prompt(length: int) -> float:
    context = Context("r", _text(length), 1, SamplingParams())
    return best(lambda: NgramDrafter(depth=5, width=3).propose([context]))
