"""The help page of the two comparison screens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specscope.tui.compared import KnownCause
from specscope.tui.keys import shown_key
from specscope.tui.screens.help import COLOURS, MARKS, NODE, Part, Row, two_columns
from specscope.tui.text import Line

PAIRS: tuple[Row, ...] = (
    ("↑ ↓", "key", "pick a pair of requests"),
    ("Enter", "key", "open the pair where its outputs part"),
    ("n N", "key", "next, previous pair that parts"),
    ("c", "key", "what changed most: requests, labels, depths"),
)
PARTING: tuple[Row, ...] = (
    ("↑ ↓", "key", "pick a place in the output; the trees follow"),
    ("PgUp", "key", "ten places up"),
    ("PgDn", "key", "ten places down"),
    ("p", "key", "go to where the outputs part"),
    ("d", "key", "go to the first decision that differs"),
    ("n N", "key", "next, previous pair that parts"),
    ("Esc", "key", "back to the pairs"),
)
COLUMNS: tuple[Row, ...] = (
    ("τ A, τ B", "strong", "mean acceptance length of the request in each capture"),
    ("change", "strong", "τ B less τ A"),
    ("parts at", "strong", "output tokens before the first that differs"),
)
MARKS_HERE: tuple[Row, ...] = (*MARKS[:-2], ("»", "warn", "the step in which the outputs part; a final token"))


def compare_help_lines(width: int, causes: Sequence[KnownCause], keymap: Mapping[str, str]) -> list[Line]:
    """The page, for a width in cells, with what can make two outputs part, and the keys as the settings bind them."""

    def key(*names: str) -> str:
        return " ".join(shown_key(name, keymap) for name in names)

    pairs: tuple[Row, ...] = (
        *PAIRS,
        (key("filter"), "key", "filter the pairs: request, cause or prompt"),
        (key("sort", "sort_reverse"), "key", "sort by the next column; reverse"),
    )
    anywhere: tuple[Row, ...] = (
        ("Tab", "key", "next panel; the arrow keys scroll it"),
        (key("theme"), "key", "theme: light or dark"),
        (key("help"), "key", "this page"),
        (key("quit"), "key", "quit"),
        ("q", "key", "close where a pair is open"),
    )
    keys: list[Part] = [("Keys: pairs", pairs), ("Keys: one pair", PARTING), ("Keys: everywhere", anywhere)]
    why: list[Row] = [(one.name, "dim" if one.harmless else "rejected", one.about) for one in causes]
    means: list[Part] = [("Columns", COLUMNS), ("Causes", why), ("Verdicts", MARKS_HERE), ("Tokens", COLOURS), NODE]
    return two_columns(width, keys, means, labels=(7, 12))
