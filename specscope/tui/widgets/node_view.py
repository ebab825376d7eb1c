"""A NodeView as lines: the distributions of target and drafter at one place, beside each other. Pure."""

from __future__ import annotations

import math

from rich.cells import cell_len

from specscope.debug.views import DistributionView, NodeView
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.text import (
    Ink,
    Line,
    bar,
    cut,
    figure,
    fit,
    folded,
    left,
    line_width,
    paragraph,
    percent,
    probability,
    right,
    show_token,
)
from specscope.tui.widgets.decision import beside

NARROWEST = 26  # cells of a column
GAP = 3
FEWEST = 4  # tokens of a column, however little room there is
NUMBER, MARK, SHORTEST_BAR = 6, 2, 5
OVERHEAD = 4  # lines of a column besides its tokens: its name, the token's own two, and a blank one


Column = tuple[str, Ink, DistributionView | None, str]


def node_view_lines(view: NodeView, vocabulary: Vocabulary, width: int, height: int) -> list[Line]:
    """What there is to be said of the place, then the distributions. More lines than `height` where it is low."""
    said, every = _said(view, vocabulary, width), _columns(view)
    fit_in = [n for n in (len(every), len(every) // 2, 2) if width >= n * (NARROWEST + GAP) - GAP]
    columns = fit_in[0] if fit_in else 1
    rows = -(-len(every) // columns)
    if len(every) == 6 and columns == 2:
        every = (every[0], every[3], every[1], every[4], every[2], every[5])  # the drafter's beside the target's
    wide = (width - GAP * (columns - 1)) // columns
    tokens = max((height - len(said) - 1) // rows - OVERHEAD, FEWEST)
    blocks = [_column(*each, view, vocabulary, wide, tokens) for each in every]
    lines = [*said, []]
    for at in range(0, len(every), columns):
        lines += beside(blocks[at : at + columns], wide, GAP)
    return lines


def _columns(view: NodeView) -> tuple[Column, ...]:
    """(name, ink of the bars, the distribution, why there is none)."""
    target: tuple[Column, ...] = (("target, raw", "target", view.raw, ""), ("target, as sampled", "target", view.p, ""))
    drafter: tuple[Column, ...] = (
        ("drafter, raw", "bonus", view.draft, "no draft model, or no longer known"),
        ("drafter, as sampled", "bonus", view.q, "deterministic: nothing was sampled"),
    )
    if view.p_tried is None:  # its first trial, or none: the rule used both as sampled
        return (*target, *drafter)
    mass = "deterministic: all of it on this token"
    return (
        *(*target, ("target, at its trial", "target", view.p_tried, "")),
        *(*drafter, ("drafter, at its trial", "bonus", view.q_tried, mass)),
    )


def _said(view: NodeView, vocabulary: Vocabulary, width: int) -> list[Line]:
    """Contradictions first; how far target and drafter are apart; what the rules removed."""
    lines: list[Line] = [line for note in view.notes for line in paragraph(f"! {note}", width, "warn")]
    if view.kl is not None and view.tv is not None:
        kl = "∞" if math.isinf(view.kl) else figure(view.kl, 3)
        far: Line = [("KL(target‖drafter) ", "dim"), (kl, "strong"), (" nats", "dim")]
        best: Line = [("TV ", "dim"), (figure(view.tv, 3), "strong")]
        most: Line = [(f"at best {percent(1 - view.tv)} accepted", "dim")]
        row = fit([(0, far), (1, best), (2, most)], width, " · ")
        whole = line_width(row) == line_width([*far, *best, *most]) + 6
        lines += [row] if whole else [fit([(0, far)], width), fit([(0, best), (1, most)], width, " · ")]
    if view.choice_rank is not None:
        rank = f"the target's likeliest token has rank {view.choice_rank:,} in the drafter"
        lines += paragraph(rank, width, "text")
    for gone in view.removed:
        likeliest = ", ".join(f"{vocabulary.show(top.token)} {probability(top.prob)}" for top in gone.likeliest)
        text = f"{gone.rule} removes {plural(gone.tokens, 'token')}, {probability(gone.mass)} of the mass"
        text += f": {likeliest}" if likeliest else ""
        lines += paragraph(text, width, "dim")
    source = "computed again, in separate KV blocks" if view.computed else "the tensors that the step used"
    return [*lines, [(cut(source, width), "faint")]]


def _column(
    name: str,
    ink: Ink,
    column: DistributionView | None,
    why: str,
    view: NodeView,
    vocabulary: Vocabulary,
    width: int,
    most: int,
) -> list[Line]:
    """A distribution under its name: a token a line with its bar; where the view's own token stands."""
    if column is None:
        return [[(cut(name, width), "strong")], *paragraph(why, width, "faint"), []]
    entropy: Line = [(f"H {column.entropy:.2f} nats", "dim")]
    lines: list[Line] = [fit([(0, [(name, "strong")]), (1, entropy)], width)]
    shown = [(top.token, top.prob) for top in column.top[:most]]
    lines += [[("▸ " if at == 0 else "  ", "accent"), (row, "accent")] for at, row in enumerate(_own(column, width))]
    texts = [show_token(vocabulary, token) for token, _ in shown]
    room = min(max(map(cell_len, texts), default=1), width - MARK - SHORTEST_BAR - NUMBER - 1)
    for (token, prob), text in zip(shown, texts, strict=True):
        mine = token == view.token
        track = width - MARK - room - 1 - NUMBER
        full = bar(prob, track)
        lines.append(
            [
                ("▸ " if mine else "  ", "accent"),
                (left(text, room) + " ", "accent" if mine else "text"),
                (full, ink),
                (" " * (track - len(full)), "text"),
                (right(probability(prob), NUMBER), "strong" if mine else "dim"),
            ]
        )
    return [*lines, []]


def _own(column: DistributionView, width: int) -> list[str]:
    """The view's own token in this distribution, in words."""
    if column.outside:
        said = "outside the draft vocabulary"
    elif column.rank is None:
        said = "0: excluded"
    else:
        said = f"{probability(column.prob)}, rank {column.rank:,}"
    return folded(said, width - MARK)
