"""Colours: two themes, and what each ink means in the dark and in the light."""

from __future__ import annotations

from functools import cache

from rich.style import Style
from rich.text import Text
from textual.theme import Theme

from specscope.tui.text import Ink, Line

DARK = Theme(
    name="scope-dark",
    primary="#7aa2f7",
    secondary="#9aa5ce",
    accent="#7dcfff",
    foreground="#c8ccd8",
    background="#15171e",
    surface="#15171e",
    panel="#1e212b",
    success="#7ddb8a",
    warning="#e6b450",
    error="#f7768e",
    dark=True,
    variables={"rule": "#3a3f4f", "row": "#262b3a"},
)
LIGHT = Theme(
    name="scope-light",
    primary="#2f5fd0",
    secondary="#5a6480",
    accent="#0b6fa4",
    foreground="#262a33",
    background="#fbfbf8",
    surface="#fbfbf8",
    panel="#efefea",
    success="#1a7f37",
    warning="#9a6200",
    error="#c4314b",
    dark=False,
    variables={"rule": "#c3c5cc", "row": "#e2e8f5"},
)

_DARK: dict[Ink, str] = {
    "text": "#c8ccd8",
    "strong": "bold #eef0f6",
    "dim": "#979db1",
    "faint": "#6a7187",
    "accent": "#7dcfff",
    "warn": "#e6b450",
    "accepted": "#7ddb8a",
    "accepted-strong": "bold #7ddb8a",
    "rejected": "#f7768e",
    "bonus": "bold #7aa2f7",
    "recovered": "bold #e6b450",
    "target": "bold #c8a0f0",
    "prompt": "#979db1",
    "bar": "#5fae8a",
    "rail": "#3a3f4f",
    "key": "bold #7dcfff",
}
_LIGHT: dict[Ink, str] = {
    "text": "#262a33",
    "strong": "bold #000000",
    "dim": "#575d6c",
    "faint": "#7a808f",
    "accent": "#0b6fa4",
    "warn": "#9a6200",
    "accepted": "#1a7f37",
    "accepted-strong": "bold #1a7f37",
    "rejected": "#c4314b",
    "bonus": "bold #2f5fd0",
    "recovered": "bold #9a6200",
    "target": "bold #8035b5",
    "prompt": "#575d6c",
    "bar": "#3f9a6d",
    "rail": "#c3c5cc",
    "key": "bold #0b6fa4",
}


@cache
def style(ink: Ink, dark: bool) -> Style:
    """The style of an ink."""
    return Style.parse((_DARK if dark else _LIGHT)[ink])


def to_text(line: Line, dark: bool) -> Text:
    """A line as Rich text, for border titles: styled spans, no markup."""
    return Text.assemble(*((text, style(ink, dark)) for text, ink in line))
