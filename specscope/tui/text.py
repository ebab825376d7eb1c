"""Lines of styled text, and the small formats that every panel shares. Pure: no widgets, no markup."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.cells import cell_len, set_cell_size

from specscope.trace.history.wording import probability as probability
from specscope.trace.record.vocabulary import Vocabulary

Shade = Literal["text", "strong", "dim", "faint", "accent", "warn", "prompt", "key"]
VerdictInk = Literal["accepted", "accepted-strong", "rejected", "bonus", "recovered", "target"]
Ink = Literal[Shade, VerdictInk, "bar", "rail"]
Line = Sequence[tuple[str, Ink]]

NOTHING = "–"
NARROWEST_TEXT = 10  # cells of a text beside a label
BEFORE = 4  # characters that are shown before what tells two texts apart
EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = " ▁▂▃▄▅▆▇█"


def line_width(line: Line) -> int:
    """The cells that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def joined(pieces: Iterable[tuple[str, Ink]]) -> list[tuple[str, Ink]]:
    """Neighbouring pieces of one ink joined into one."""
    line: list[tuple[str, Ink]] = []
    for text, ink in pieces:
        if line and line[-1][1] == ink:
            line[-1] = (line[-1][0] + text, ink)
        else:
            line.append((text, ink))
    return line


def cut(text: str, width: int) -> str:
    """The text in at most `width` cells, an ellipsis where it was longer."""
    if width <= 0:
        return ""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def cut_apart(a: str, b: str, width_a: int, width_b: int) -> tuple[str, str]:
    """Two texts that differ, each in its cells: from shortly before they do where their beginnings alone would fit."""
    common = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    whole = cell_len(a) <= width_a and cell_len(b) <= width_b
    if not whole and common > BEFORE and common + 1 >= min(width_a, width_b):
        a, b = (f"…{text[common - BEFORE :]}" for text in (a, b))
    return cut(a, width_a), cut(b, width_b)


def left(text: str, width: int) -> str:
    """The text in exactly `width` cells, flush left."""
    text = cut(text, width)
    return text + " " * (width - cell_len(text))


def right(text: str, width: int) -> str:
    """The text in exactly `width` cells, flush right."""
    text = cut(text, width)
    return " " * (width - cell_len(text)) + text


def clean(text: str) -> str:
    """Model or user text on one line, safe for a terminal: control and format characters are escaped."""
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥", "\r": "␍"}.get(c, repr(c)[1:-1]) for c in text)


def folded(text: str, width: int) -> list[str]:
    """The text on lines of at most `width` cells, broken at spaces where there are any; control characters escaped."""
    rest = clean(text).rstrip()
    lines: list[str] = []
    while rest:
        if cell_len(rest) <= width:
            return [*lines, rest]
        head = set_cell_size(rest, max(width, 2)).rstrip()
        end = head.rfind(" ") if rest[len(head) : len(head) + 1] not in (" ", "") else len(head)
        end = end if end > 0 else max(len(head), 1)
        lines.append(rest[:end])
        rest = rest[end:].lstrip()
    return lines


def paragraph(text: str, width: int, ink: Ink) -> list[Line]:
    """The text on lines of at most `width` cells, all in one ink."""
    return [[(row, ink)] for row in folded(text, width)]


def labelled(label: str, ink: Ink, text: str, text_ink: Ink, wide: int, width: int) -> list[Line]:
    """A label in `wide` cells with the text beside it; what is too long goes on below, under the text."""
    rows = folded(text, max(width - wide, NARROWEST_TEXT)) or [""]
    return [[(left("" if number else label, wide), ink), (row, text_ink)] for number, row in enumerate(rows)]


def show_token(vocabulary: Vocabulary, token: int) -> str:
    """A token for people; a lone combining mark gets a circle to stand on."""
    text = vocabulary.show(token)
    return "◌" + text if text and unicodedata.combining(text[0]) else text


def figure(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.2f}"


def percent(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.0f}%"


def bar(share: float, width: int) -> str:
    """A horizontal bar of `share` (0 to 1) of `width` cells, to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def spread(count: int, span: int) -> list[int]:
    """The cells of each of `count` columns that together fill `span` cells, as even as can be."""
    return [(column + 1) * span // count - column * span // count for column in range(count)]


def fit(parts: Iterable[tuple[int, Line]], width: int, gap: str = "  ") -> list[tuple[str, Ink]]:
    """Join the parts with `gap` between, in order; those of the lowest numbers get their room first."""
    given = [(rank, part) for rank, part in parts if line_width(part)]
    shown: set[int] = set()
    room = width
    for index in sorted(range(len(given)), key=lambda index: given[index][0]):
        need = line_width(given[index][1]) + (cell_len(gap) if shown else 0)
        if need <= room:
            shown.add(index)
            room -= need
        elif not shown:
            return [(cut("".join(text for text, _ in given[index][1]), width), given[index][1][0][1])]
    line: list[tuple[str, Ink]] = []
    for index in sorted(shown):
        line += [*([(gap, "faint")] if line else ()), *given[index][1]]
    return line


def blocks(eighths: Sequence[int], rows: int, span: int) -> list[str]:
    """Rows of `span` block characters, from the top: a column for each height in eighths of a cell."""
    wide = list(zip(eighths, spread(len(eighths), span), strict=True))
    return ["".join(LEVELS[max(0, min(8, e - 8 * (rows - 1 - row)))] * w for e, w in wide) for row in range(rows)]
