"""The columns of nodes and of parents: those of the evidence as Arrow arrays, null where the capture has no value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specscope.analyze.evidence.columns import Columns
from specscope.trace.record.notes import SOURCES
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import Bools, Drawn

Array = NDArray[Any]
Pieces = Callable[[Array], pa.Array]  # the texts of tokens
OUTCOMES = [outcome.name.lower() for outcome in Outcome]
DRAWN = [drawn.name.lower() for drawn in Drawn]


def node_columns(c: Columns, pieces: Pieces) -> list[pa.Array]:
    """[N] each: the columns of schema.NODES after the keys."""
    has_p, deterministic = c.tells_p[c.step], ~c.sampled
    judged = has_p & c.tried
    has_margin = (c.coin != 0) | (c.margin == 1)  # without a coin, only where nothing could change the outcome
    noted = np.array([part.notes is not None for part in c.parts], np.bool_)[c.step]
    return [
        _ints(c.node),
        _ints(c.parent),
        _ints(c.depth),
        _ints(c.sibling + 1),
        ids(c.token),
        pieces(c.token),
        _coded(DRAWN, c.drawn),
        _floats(c.q),
        _coded(OUTCOMES, c.outcome),
        pa.array(c.forced),
        pa.array(c.by_own_coin),
        _floats(c.p, has_p),
        *(_floats(values, judged) for values in (c.p_trial, c.q_trial)),
        _doubles(c.accept_prob, judged),
        _doubles(c.coin, c.coin != 0),
        *(_doubles(values, c.drawn_by_coin) for values in (c.draft_coin, c.draft_low)),
        _doubles(c.residual_mass, has_p & c.rejected),
        _doubles(c.margin, judged & has_margin),
        _floats(c.prob, noted & deterministic),
        _floats(c.score, noted),
        _floats(c.confidence, c.tells_confidence),
        _ints(c.module, c.module >= 0),
        _coded(SOURCES, c.source, c.source >= 0),
        *_parent_columns(c),
    ]


def _parent_columns(c: Columns) -> list[pa.Array]:
    """[N] each: what target and drafter gave at each node's parent."""
    e = c.parents
    places = e.at_node
    given, drawn = places >= 0, c.sampled
    row = np.where(given, places, 0)
    # Whether the drafter is a model that ran at the parent: beside text lookup it may not have
    of_model = given & _of(np.any(e.draft_top_p > 0, axis=1), row) if len(e) else given
    return [
        _floats(e.raw_p, given),
        *(_ints(ranks, given & (ranks > 0)) for ranks in (e.rank, e.q_rank)),
        _ints(_of(e.choice, row), given & (_of(e.choice, row) != NO_TOKEN)),
        *(_floats(_of(values, row), given) for values in (e.choice_p, e.entropy, e.varentropy)),
        *(_floats(_of(values, row), given & drawn) for values in (e.q_entropy, e.q_varentropy)),
        _ints(_of(e.choice_rank, row), of_model),
        *(_floats(_of(values, row), of_model) for values in (e.choice_q, e.outside)),
        *_lists(e.top, e.top_p, e.tops, row, given),
        *_lists(e.draft_top, e.draft_top_p, e.draft_tops, row, of_model),
    ]


def parent_columns(c: Columns) -> list[pa.Array]:
    """[K] each: the columns of schema.PARENTS after the keys."""
    e, row = c.parents, np.arange(len(c.parents))
    depth = np.concatenate([[0], c.depth])[np.where(e.node < 0, 0, c.start[e.step] + e.node + 1)]
    looked = np.any(e.draft_top_p > 0, axis=1) if len(e) else np.zeros(0, np.bool_)
    return [
        _ints(e.node),
        _ints(depth),
        ids(e.choice),
        *(_floats(values) for values in (e.choice_p, e.entropy, e.varentropy, e.q_entropy, e.q_varentropy)),
        _ints(e.choice_rank, looked),
        *(_floats(values, looked) for values in (e.choice_q, e.outside)),
        *_lists(e.top, e.top_p, e.tops, row, np.ones(len(e), np.bool_)),
        *_lists(e.draft_top, e.draft_top_p, e.draft_tops, row, looked),
    ]


def _of(values: Array, rows: Array) -> Array:
    """Values over parents at these rows; zeros where there are no parents."""
    return values[rows] if len(values) else np.zeros(len(rows), values.dtype)


def _lists(tokens: Array, shares: Array, widths: Array, row: Array, given: Bools) -> tuple[pa.Array, pa.Array]:
    """[N] lists of the nodes' parents: the likeliest tokens, where they are recorded, and their probabilities."""
    listed = np.arange(tokens.shape[1]) < widths[:, None]
    ends = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]).astype(np.int32))
    with_ids = given & ~np.any(tokens[listed] == NO_TOKEN)
    return tuple(
        pa.ListArray.from_arrays(ends, pa.array(values[listed].astype(kind))).take(pa.array(row, mask=~known))
        for values, kind, known in ((tokens, np.int32, with_ids), (shares, np.float32, given))
    )


def ids(tokens: Array) -> pa.Array:
    """Token ids; null where they were left out."""
    return _ints(tokens, tokens != NO_TOKEN)


def _where(values: Array, known: Bools | None) -> pa.Array:
    return pa.array(values, mask=None if known is None else ~known)


def _ints(values: Array, known: Bools | None = None) -> pa.Array:
    """A column that is null where it is not known."""
    return _where(values.astype(np.int32), known)


def _floats(values: Array, known: Bools | None = None) -> pa.Array:
    return _where(values.astype(np.float32), known)


def _doubles(values: Array, known: Bools | None = None) -> pa.Array:
    return _where(values, known)


def _coded(texts: Sequence[str], codes: Array, known: Bools | None = None) -> pa.Array:
    """Texts by their codes; null where not known."""
    return pa.DictionaryArray.from_arrays(_ints(codes, known), pa.array(texts))
