"""What a difference of one operation looks like: rows of an engine held against the same rows of the reference.

First which rows differ, then which heads or channels of these, then how what is left relates to the right values. Every
relation must explain nearly all of the difference at nearly all of the rows, so that noise is not taken for structure.
The relations themselves stand in `relations`, `rotation` and `rounding`; scores of attention have `score_likeness`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.block import Block, relative_errors
from specscope.analyze.locate.model.places import place_of_channels, place_of_heads, place_of_rows, place_of_tokens
from specscope.analyze.locate.model.relations import RELATIONS, added, factor, not_finite, other_rows
from specscope.analyze.locate.model.rotation import rotated
from specscope.analyze.locate.model.rounding import noise, rounded


def looks(
    ours: Tensor,
    right: Tensor,
    *,
    rows: Sequence[FedRow],
    heads: int = 1,
    others: Tensor | None = None,
    groups: Mapping[str, Tensor] | None = None,
    vectors: Mapping[str, Tensor] | None = None,
    tokens: Tensor | None = None,
    allowed: float = 1e-4,
) -> str:
    """What the difference of `ours` from `right` is like, in one phrase with figures; "" where like nothing known.

    ours, right: float32 [rows, width]; with heads, width = heads * size. others: [m, width], right values at other
    positions or of other requests, in which rows of ours are looked for. groups: ids of each row, [rows] or [rows, k],
    by the name of the group ("expert": those that a row is given to). vectors: [width] or [rows, width] by name ("the
    bias", "the input"), which may be missing, added twice, or stand in the place of the output. allowed: the relative
    error of a row that rounding explains. Shapes that do not fit give "".
    """
    if not _usable(ours, right, rows):
        return ""
    ours, right = ours.detach().float(), right.detach().float()
    heads = heads if heads > 0 and ours.shape[1] % heads == 0 else 1
    wrong = (relative_errors(ours, right, heads) > allowed).any(1)
    if not bool(wrong.any()):
        return ""
    place = place_of_rows(wrong, rows, groups or {})
    bad = ours[wrong]
    if not bool(bad.isfinite().all()):
        return _joined(place, not_finite(bad))
    if tokens is not None:
        which = place_of_tokens(bad, right[wrong], tokens[wrong], allowed)
        of_rows = Block.of_rows(ours, right, wrong, rows, 1, None, {}, allowed)
        return _joined(place, which or _first(of_rows, factor, added))
    block = Block.of_rows(ours, right, wrong, rows, heads, others, vectors or {}, allowed)
    # rounding and rotation leave some channels nearly as they were: they are asked for before channels are chosen
    rule, columns, left = place_of_heads(block.ours, block.right, heads, allowed)
    by_heads = block.narrowed(columns, left)
    whole = rounded(by_heads) or _first(by_heads, rotated)
    if whole:
        return _joined(place, rule, whole)
    channels, columns, left = place_of_channels(block.ours, block.right, heads, allowed)
    narrow = block.narrowed(columns, left)
    relation = _first(narrow, *RELATIONS)
    if not relation and len(columns) < ours.shape[1]:
        # rows that share channels (a row of another position with the same first half) differ in some only
        relation = _first(block, other_rows)
        channels = "" if relation else channels
    return _joined(place, channels, rounded(narrow) or relation or noise(narrow))


def _first(block: Block, *relations: Callable[[Block], str]) -> str:
    """The phrase of the first relation that holds; most are ruled out by a few rows."""
    sample = block.sampled()
    phrases = (relation(block) for relation in relations if relation(sample))
    return next((phrase for phrase in phrases if phrase), "")


def _usable(ours: Tensor, right: Tensor, rows: Sequence[FedRow]) -> bool:
    return (
        ours.dim() == 2
        and ours.shape == right.shape
        and ours.numel() > 0
        and ours.shape[0] == len(rows)
        and bool(right.isfinite().all())
    )


def _joined(*phrases: str) -> str:
    """From the place to the relation: "only in head 2 of 9: all zero at 37 of 37 rows"."""
    return ": ".join(phrase for phrase in phrases if phrase)
