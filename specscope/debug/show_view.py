"""A NodeView as plain text, for the console."""

from __future__ import annotations

from collections.abc import Iterator

from specscope.debug.views import DistributionView, NodeView, Removed
from specscope.trace.record.vocabulary import Vocabulary

SHOWN = 8  # of the likeliest tokens


def removed_text(one: Removed, vocabulary: Vocabulary) -> str:
    """What a rule removed, and the likeliest of it where that is told."""
    best = ", ".join(f"{vocabulary.show(top.token)} {top.prob:.3g}" for top in one.likeliest)
    return f"{one.rule} removed {one.tokens:,} tokens of mass {one.mass:.4g}" + (f": {best}" if best else "")


def view_text(view: NodeView, vocabulary: Vocabulary) -> str:
    """Top tokens side by side, what the rules removed, ranks, entropies and distances; contradictions last."""
    columns = {
        "target, raw": view.raw,
        "target, as sampled": view.p,
        "target, at its trial": view.p_tried,
        "drafter, raw": view.draft,
        "drafter, as sampled": view.q,
        "drafter, at its trial": view.q_tried,
    }
    there = {name: column for name, column in columns.items() if column is not None}
    tables = [list(_cells(name, column, view.token, vocabulary)) for name, column in there.items()]
    lines = ["  ".join(cells).rstrip() for cells in zip(*tables, strict=True)]
    lines += [removed_text(one, vocabulary) for one in view.removed]
    what = "the final token" if view.node is None else "the drafted token"
    lines += [f"{name}: {what} {_place(column)}" for name, column in there.items()]
    if view.p_tried is not None and view.q is None:
        lines.append("deterministic: the rule has all of q on this token")
    if view.kl is not None and view.tv is not None:
        rank = "outside its vocabulary" if view.choice_rank is None else f"rank {view.choice_rank}"
        lines.append(
            f"the target's likeliest token in the drafter: {rank}; KL(target, drafter) {view.kl:.4f} nats, "
            f"total variation {view.tv:.4f} (at best {1 - view.tv:.4f} accepted)"
        )
    if view.computed:
        lines.append(f"computed again for step {view.step}, in separate KV blocks")
    lines += [f"CONTRADICTION: {note}" for note in view.notes]
    return "\n".join(line for line in lines if line)


def _cells(name: str, column: DistributionView, token: int, vocabulary: Vocabulary) -> Iterator[str]:
    """A column's lines, all of one width."""
    texts = [(f"{'▸' if one.token == token else ' '}{vocabulary.show(one.token)}", one.prob) for one in column.top]
    width = max([len(name) - 8, *(len(text) for text, _ in texts[:SHOWN])])
    yield f"{name:<{width + 8}}"
    for row in range(SHOWN):
        yield f"{texts[row][0]:<{width}}  {texts[row][1]:.4f}" if row < len(texts) else " " * (width + 8)


def _place(column: DistributionView) -> str:
    """The token's probability and rank in a column, and the column's entropy."""
    if column.outside:
        where = "is outside the draft vocabulary"
    else:
        where = f"has p {column.prob:.4g}" + ("" if column.rank is None else f", rank {column.rank:,}")
    return f"{where}; entropy {column.entropy:.4f} nats"
