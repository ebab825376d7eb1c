"""Colours: two themes, and what each ink means in the dark and in the light."""

from __future__ import annotations

import os
from functools import cache

from rich.style import Style
from rich.text import Text
from textual.theme import Theme

from specscope.tui.text import Ink, Line

# What each role is in the dark, and in the light
ROLES = {
    "primary": ("#7aa2f7", "#2f5fd0"),
    "secondary": ("#9aa5ce", "#5a6480"),
    "accent": ("#7dcfff", "#0a6798"),
    "foreground": ("#c8ccd8", "#262a33"),
    "background": ("#15171e", "#fbfbf8"),
    "surface": ("#15171e", "#fbfbf8"),
    "panel": ("#1e212b", "#efefea"),
    "success": ("#7ddb8a", "#177432"),
    "warning": ("#e6b450", "#8c5900"),
    "error": ("#f7768e", "#bd2c46"),
}
VARIABLES = {"rule": ("#3a3f4f", "#c3c5cc"), "row": ("#242938", "#e6ebf7")}
INKS: dict[Ink, tuple[str, str]] = {
    "text": ("#c8ccd8", "#262a33"),
    "strong": ("bold #eef0f6", "bold #000000"),
    "dim": ("#a6acc0", "#4a505e"),
    "faint": ("#8990a8", "#636979"),
    "accent": ("#7dcfff", "#0a6798"),
    "warn": ("#e6b450", "#8c5900"),
    "accepted": ("#7ddb8a", "#177432"),
    "accepted-strong": ("bold #7ddb8a", "bold #177432"),
    "rejected": ("#f7768e", "#bd2c46"),
    "bonus": ("bold #7aa2f7", "bold #2f5fd0"),
    "recovered": ("bold #e6b450", "bold #8c5900"),
    "target": ("bold #c8a0f0", "bold #8035b5"),
    "prompt": ("#a6acc0", "#4a505e"),
    "bar": ("#5fae8a", "#3f9a6d"),
    "rail": ("#3a3f4f", "#c3c5cc"),
    "key": ("bold #7dcfff", "bold #0a6798"),
}
WITHOUT_COLOUR = {"bonus": " underline", "recovered": " reverse"}  # beside bold (target) and plain (accepted)
DARK, LIGHT = (
    Theme(
        f"scope-{name}",
        **{role: pair[place] for role, pair in ROLES.items()},  # type: ignore[arg-type]
        dark=not place,
        variables={variable: pair[place] for variable, pair in VARIABLES.items()},
    )
    for place, name in enumerate(("dark", "light"))
)


@cache
def style(ink: Ink, dark: bool) -> Style:
    return Style.parse(INKS[ink][not dark] + (WITHOUT_COLOUR.get(ink, "") if os.environ.get("NO_COLOR") else ""))


def to_text(line: Line, dark: bool) -> Text:
    """A line as Rich text, for border titles: styled spans, no markup."""
    return Text.assemble(*((text, style(ink, dark)) for text, ink in line))
