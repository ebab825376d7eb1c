"""The screens of `specscope compare --tui`, and their help page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specscope.tui.answer import AnswerApp
from specscope.tui.compared import Compared, KnownCause
from specscope.tui.screens.compare_view import CompareScreen
from specscope.tui.screens.help import COLOURS, MARKS, NODE, Part, Row, two_columns
from specscope.tui.settings import Settings
from specscope.tui.text import Line

PAIRS: tuple[Row, ...] = (
    ("↑ ↓", "key", "pick a pair of requests"),
    ("Enter", "key", "open the pair where its outputs part"),
    ("n N", "key", "next, previous pair that parts"),
    ("c", "key", "what changed most: requests, labels, depths"),
    ("/", "key", "filter the pairs: request, cause or prompt"),
    ("o O", "key", "sort by the next column; reverse"),
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
ANYWHERE: tuple[Row, ...] = (
    ("Tab", "key", "next panel; the arrow keys scroll it"),
    ("t", "key", "theme: light or dark"),
    ("?", "key", "this page"),
    ("q", "key", "quit"),
    ("q", "key", "close where a pair is open"),
)
COLUMNS: tuple[Row, ...] = (
    ("τ A, τ B", "strong", "mean acceptance length of the request in each capture"),
    ("change", "strong", "τ B less τ A"),
    ("parts at", "strong", "output tokens before the first that differs"),
)
MARKS_HERE: tuple[Row, ...] = (*MARKS[:-2], ("»", "warn", "the step in which the outputs part; a final token"))


def compare_app(compared: Compared, settings: Settings | None = None) -> AnswerApp:
    """Shows one comparison."""
    lines = partial(compare_help_lines, causes=compared.causes)
    return AnswerApp(
        "specscope compare", compared.vocabularies[0], lambda look: CompareScreen(look, compared), lines, settings
    )


def compare_help_lines(width: int, causes: Sequence[KnownCause]) -> list[Line]:
    """The help page for a width in cells: what can make two outputs part, and the keys."""
    keys: list[Part] = [("Keys: pairs", PAIRS), ("Keys: one pair", PARTING), ("Keys: everywhere", ANYWHERE)]
    why: list[Row] = [(cause.name, "dim" if cause.harmless else "rejected", cause.about) for cause in causes]
    means: list[Part] = [("Columns", COLUMNS), ("Causes", why), ("Verdicts", MARKS_HERE), ("Tokens", COLOURS), NODE]
    return two_columns(width, keys, means, labels=(7, 12))
