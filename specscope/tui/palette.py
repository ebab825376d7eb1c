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
    variables={"rule": "#3a3f4f", "row": "#242938"},
)
LIGHT = Theme(
    name="scope-light",
    primary="#2f5fd0",
    secondary="#5a6480",
    accent="#0a6798",
    foreground="#262a33",
    background="#fbfbf8",
    surface="#fbfbf8",
    panel="#efefea",
    success="#177432",
    warning="#8c5900",
    error="#bd2c46",
    dark=False,
    variables={"rule": "#c3c5cc", "row": "#e6ebf7"},
)

_DARK: dict[Ink, str] = {
    "text": "#c8ccd8",
    "strong": "bold #eef0f6",
    "dim": "#a6acc0",
    "faint": "#8990a8",
    "accent": "#7dcfff",
    "warn": "#e6b450",
    "accepted": "#7ddb8a",
    "accepted-strong": "bold #7ddb8a",
    "rejected": "#f7768e",
    "bonus": "bold #7aa2f7",
    "recovered": "bold #e6b450",
    "target": "bold #c8a0f0",
    "prompt": "#a6acc0",
    "bar": "#5fae8a",
    "rail": "#3a3f4f",
    "key": "bold #7dcfff",
}
_LIGHT: dict[Ink, str] = {
    "text": "#262a33",
    "strong": "bold #000000",
    "dim": "#4a505e",
    "faint": "#636979",
    "accent": "#0a6798",
    "warn": "#8c5900",
    "accepted": "#177432",
    "accepted-strong": "bold #177432",
    "rejected": "#bd2c46",
    "bonus": "bold #2f5fd0",
    "recovered": "bold #8c5900",
    "target": "bold #8035b5",
    "prompt": "#4a505e",
    "bar": "#3f9a6d",
    "rail": "#c3c5cc",
    "key": "bold #0a6798",
}


@cache
def style(ink: Ink, dark: bool) -> Style:
    """The style of an ink."""
    return Style.parse((_DARK if dark else _LIGHT)[ink])


def to_text(line: Line, dark: bool) -> Text:
    """A line as Rich text, for border titles: styled spans, no markup."""
    return Text.assemble(*((text, style(ink, dark)) for text, ink in line))
