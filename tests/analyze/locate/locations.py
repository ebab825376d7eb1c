"""Locations made by hand: a head whose attention is scaled, a healthy run, and one that could not be placed."""

import numpy as np

from specscope.analyze.findings import Reference
from specscope.analyze.locate.located import FedRow, Held, Located, Location, Operation, Stage, Walk

WHERE = Reference("r3", 17, 41, 4)
HEADS, ROWS = 9, 14
NAMES = (
    ("input_layernorm", "layer 0: the norm before attention", 1),
    ("self_attn.q_proj", "layer 0: the queries' projection", HEADS),
    ("self_attn.k_proj", "layer 0: the keys' projection", 3),
    ("self_attn.v_proj", "layer 0: the values' projection", 3),
    ("self_attn.query", "layer 0: queries after rotary", HEADS),
    ("self_attn.keys read", "layer 0: keys as read from the cache", 3),
    ("self_attn.scores", "layer 0: scores with the mask", HEADS),
    ("self_attn.attention", "layer 0: attention's output", HEADS),
    ("self_attn.o_proj", "layer 0: the output's projection", 1),
    ("mlp", "layer 0: the MLP", 1),
)
ROWS_FED = tuple(FedRow(90 + row, 300 + row, None if row < 10 else row - 10) for row in range(ROWS))


def held(place: int, first: int | None, stage: Stage = Stage.DRAFTER) -> Held:
    """An operation of the walk: right before `first`, and wrong from there on in the rows behind position 95."""
    name, words, parts = NAMES[place]
    code = "specscope/speculate/drafters/head.py:88 attend"
    rng = np.random.default_rng(place)
    errors = (10.0 ** rng.uniform(-7.5, -6.2, (ROWS, parts))).astype(np.float32)
    if first is not None and place >= first:
        errors[6:] = 0.42 * 10.0 ** rng.uniform(-1.2, 0, (ROWS - 6, parts))
    differing = int((errors.max(axis=1) > 3e-5).sum())
    return Held(Operation(stage, f"layers.0.{name}", words, code), 3e-5, float(errors.max()), ROWS, differing, errors)


def walk(first: int | None, stage: Stage = Stage.DRAFTER) -> Walk:
    """All operations of a layer."""
    operations = tuple(held(place, first, stage) for place in range(len(NAMES)))
    return Walk(stage, WHERE, ROWS_FED, operations, "specscope, torch's operators", "plain transformers, float32")


def wrong() -> Location:
    """The scores differ from position 96 on."""
    shown = walk(6)
    located = Located(
        shown.operations[6].operation,
        "queries and keys agree to 6e-07; scores differ by a factor of 0.577 in 8 of 14 rows",
        looks="a factor of 0.577 = 1/sqrt(3) from position 96 on",
        smallest="97 tokens of r3, row 96",
        where=WHERE,
        explained=8,
        differing=8,
        runner_up="a sliding window of 96: leaves 3 of 8 rows",
    )
    ruled_out = ("target: 30 layers agree in 14 rows of r3@17", "sampling: the rules give the recorded p at 212 nodes")
    return Location("run.jsonl", (located,), (walk(None, Stage.TARGET), shown), ruled_out, seconds=12.3)


def healthy() -> Location:
    """Nothing differs."""
    return Location("run.jsonl", (), (walk(None, Stage.TARGET), walk(None)), ("draws: 212 draws made again",))


def unplaced() -> Location:
    """Something differs, and no operation is it; the drafter is not at hand."""
    lines = ("draws: 12 of 80 coins lie outside their interval",)
    return Location("run.jsonl", (), (), unexplained=lines, left_out=("drafter: [b]x[/b] is not at hand",))
