"""What differs first in a drafter's pass, as a fault with its place."""

from __future__ import annotations

from dataclasses import replace

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.located import Located
from specscope.analyze.locate.model.likeness import looks
from specscope.analyze.locate.model.score_likeness import looks_of_scores
from specscope.measure.locate.answer import sentence, smallest_input
from specscope.measure.locate.both import Both, PassCompared
from specscope.trace.record.vocabulary import Vocabulary

LOG = 1e-3  # of a log of attention's weights: rounding explains that much


def located_in(compared: PassCompared, where: Where, contexts: Contexts, vocabulary: Vocabulary) -> Located:
    """The operation at which a pass differs first."""
    wrong, both = compared.held[-1], compared.wrong
    assert both is not None
    agree = [held for held in compared.held[:-1] if held.rows]
    return Located(
        wrong.operation,
        sentence(wrong, agree),
        likeness(both, wrong.allowed, vocabulary),
        smallest_input(both.rows, wrong, contexts, vocabulary.show),
        replace(where, node=_node(both, wrong.errors > wrong.allowed)),
        explained=wrong.differing,
        differing=wrong.differing,
        certain=both.certain,
    )


def likeness(both: Both, allowed: float, vocabulary: Vocabulary) -> str:
    """What the difference looks like."""
    if both.looks:
        return both.looks
    if both.keys:
        ours, right = both.ours.clamp(min=0).log(), both.right.log()
        return looks_of_scores(ours, right, rows=both.rows, keys=both.keys, size=both.size, allowed=max(allowed, LOG))
    if both.name == "positions":
        return _shifted(both)
    if both.name in ("d2t", "vocabulary"):
        return _of_map(both, allowed, vocabulary)
    return looks(both.ours, both.right, rows=both.rows, heads=both.heads, others=both.others, allowed=allowed)


def _node(both: Both, wrong: object) -> int | None:
    """The first node that shows it."""
    for row, off in zip(both.rows, wrong.any(1).tolist(), strict=False):  # type: ignore[attr-defined]
        if off:
            return row.node
    return None


def _shifted(both: Both) -> str:
    """By how much positions are off."""
    off = (both.ours - both.right)[:, 0].tolist()
    bad = [by for by in off if by]
    if len(set(bad)) != 1:
        return ""
    first = next(row for row, by in zip(both.rows, off, strict=True) if by)
    return f"{int(bad[0]):+d} at {len(bad)} of {len(off)} rows, the first at position {first.position}"


def _of_map(both: Both, allowed: float, vocabulary: Vocabulary) -> str:
    """What is wrong with the map to the target's vocabulary, or with the mask of what can be drafted."""
    can, ought = (~x.isneginf().all(0) for x in (both.ours, both.right))
    missing, extra = (x.nonzero()[:, 0].tolist() for x in (ought & ~can, can & ~ought))
    if missing and not extra:
        first = int(can.nonzero().max()) + 1 if bool(can.any()) else 0
        if first <= missing[0] and len(missing) > 1:
            return (
                f"the first {missing[0]} tokens of the vocabulary alone: {len(missing)} behind them cannot be drafted"
            )
        shown = ", ".join(f"{token} ({vocabulary.show(token)})" for token in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return f"of {int(ought.sum())} tokens that can be drafted {shown}{more} cannot"
    places = ought.nonzero()[:, 0]
    right, ours = both.right[:, places], both.ours[:, can.nonzero()[:, 0]]
    if ours.shape == right.shape:
        for by in (1, -1, 2, -2):
            if float((ours - right.roll(by, 1)).abs().max()) <= max(allowed, 1e-4) * float(right.abs().max()):
                step = "before" if by > 0 else "behind"
                return f"each draft token stands for the target's token {abs(by)} row of d2t {step} its own"
    if missing and extra:
        return f"{len(extra)} tokens are drafted that the head does not have, and {len(missing)} that it has are not"
    return looks(both.ours.nan_to_num(neginf=0), both.right.nan_to_num(neginf=0), rows=both.rows, allowed=allowed)
