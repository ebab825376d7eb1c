"""The columns of nodes and of parents: those of the evidence as Arrow arrays, null where the capture has no value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import holding, numbers, words
from specscope.analyze.evidence.columns import Columns
from specscope.trace.record.notes import SOURCES
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import Bools, Drawn

Array = NDArray[Any]
Pieces = Callable[[Array], pa.Array]  # the texts of tokens
OUTCOMES = [outcome.name.lower() for outcome in Outcome]
DRAWN = [drawn.name.lower() for drawn in Drawn]


def node_columns(c: Columns, pieces: Pieces) -> dict[str, pa.Array]:
    """[N] each: the columns of schema.NODES besides the keys."""
    has_p, deterministic = c.tells_p[c.step], ~c.sampled
    judged = has_p & c.tried
    has_margin = (c.coin != 0) | (c.margin == 1)  # without a coin, only where nothing could change the outcome
    noted = holding(c.picked, "notes")[c.step]
    return {
        "node": _ints(c.node),
        "parent": _ints(c.parent),
        "depth": _ints(c.depth),
        "sibling": _ints(c.sibling + 1),
        "token": ids(c.token),
        "piece": pieces(c.token),
        "drawn": _coded(DRAWN, c.drawn),
        "q": _floats(c.q),
        "outcome": _coded(OUTCOMES, c.outcome),
        "forced": pa.array(c.forced),
        "judged": pa.array(c.by_own_coin),
        "p": _floats(c.p, has_p),
        "p_trial": _floats(c.p_trial, judged),
        "q_trial": _floats(c.q_trial, judged),
        "accept_prob": _doubles(c.accept_prob, judged),
        "coin": _doubles(c.coin, c.coin != 0),
        "draft_coin": _doubles(c.draft_coin, c.drawn_by_coin),
        "draft_low": _doubles(c.draft_low, c.drawn_by_coin),
        "residual_mass": _doubles(c.residual_mass, has_p & c.rejected),
        "margin": _doubles(c.margin, judged & has_margin),
        "draft_p": _floats(c.prob, noted & deterministic),
        "score": _floats(c.score, noted),
        "confidence": _floats(c.confidence, c.tells_confidence),
        "module": _ints(c.module, c.module >= 0),
        "source": _coded(SOURCES, c.source, c.source >= 0),
        **_of_parents(c),
    }


def _of_parents(c: Columns) -> dict[str, pa.Array]:
    """[N] each: what target and drafter gave at each node's parent."""
    e = c.parents
    given = e.at_node >= 0
    tried, drawn = (pa.array(e.at_node, mask=~known) for known in (given, given & c.sampled))
    columns = {name: column for name, column in parent_columns(c).items() if name not in ("node", "depth")}
    return {
        "raw_p": _floats(e.raw_p, given),
        "rank": _ints(e.rank, given & (e.rank > 0)),
        "q_rank": _ints(e.q_rank, given & (e.q_rank > 0)),
        **{
            f"parent_{name}": column.take(drawn if name.startswith("q_") else tried) for name, column in columns.items()
        },
    }


def parent_columns(c: Columns) -> dict[str, pa.Array]:
    """[K] each: the columns of schema.PARENTS besides the keys."""
    e = c.parents
    depth = np.concatenate([[0], c.depth])[np.where(e.node < 0, 0, c.start[e.step] + e.node + 1)]
    # Whether the drafter is a model that ran at the parent: beside text lookup it may not have
    looked = np.any(e.draft_top_p > 0, axis=1) if len(e) else np.zeros(0, np.bool_)
    of_target = ("choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy")
    top, top_p = _lists(e.top, e.top_p, e.tops, np.ones(len(e), np.bool_))
    draft_top, draft_top_p = _lists(e.draft_top, e.draft_top_p, e.draft_tops, looked)
    return {
        "node": _ints(e.node),
        "depth": _ints(depth),
        "choice": ids(e.choice),
        **{name: _floats(getattr(e, name)) for name in of_target},
        "choice_rank": _ints(e.choice_rank, looked),
        **{name: _floats(getattr(e, name), looked) for name in ("choice_q", "outside")},
        "top": top,
        "top_p": top_p,
        "draft_top": draft_top,
        "draft_top_p": draft_top_p,
    }


def final_columns(c: Columns, pieces: Pieces) -> dict[str, Any]:
    """[S] each: the columns of schema.FINALS besides the keys."""
    e = c.parents
    of_parents = {"entropy": e.final_entropy, "varentropy": e.final_varentropy, "target_p": e.final_p}
    return {
        "token": ids(c.final),
        "piece": pieces(c.final),
        "kind": words(c.picked, "verdict", "kind"),
        "emitted": pa.array(numbers(c.picked, "", "emitted") > c.depth_reached),
        "forced": pa.array(c.forced_final),
        "p": _doubles(c.final_p, c.tells_p),
        "coin": _doubles(c.final_coin, c.final_coin != 0),
        "margin": _doubles(c.final_margin),
        **{name: _doubles(values, e.there) for name, values in of_parents.items()},
    }


def _lists(tokens: Array, shares: Array, widths: Array, given: Bools) -> tuple[pa.Array, pa.Array]:
    """[K] lists: the likeliest tokens, where they are recorded, and their probabilities."""
    listed = np.arange(tokens.shape[1]) < widths[:, None]
    ends = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]).astype(np.int32))
    with_ids = given & ~np.any(tokens[listed] == NO_TOKEN)
    return tuple(
        pa.ListArray.from_arrays(ends, pa.array(values[listed].astype(kind)), mask=pa.array(~known))
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
