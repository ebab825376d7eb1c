"""docs/keys.md, of what the screen declares: `python -m tests.keys` writes it anew."""

from pathlib import Path

from specscope.tui.keys import COLOURS, KEYS, MARKS, RATES
from specscope.tui.screens.beside import BesideScreen
from specscope.tui.screens.compare import CompareScreen
from specscope.tui.screens.help import NODE, keys_of
from specscope.tui.screens.locate import BARS, MEANS, HeldScreen, LocateScreen
from specscope.tui.screens.points_view import PointsScreen

PAGE = Path(__file__).parent.parent / "docs" / "keys.md"
HEAD = """# Keys, marks and figures of the screen

Made by `python -m tests.keys` of what the screen itself declares; `?` shows the keys of the screen in view.
[The screen and the debugger](debugger.md) says what they are for.
"""


def page():
    """The whole page."""
    named = [(name, text) for name, _, text in NODE[1]]
    return HEAD + "".join(
        table(title, rows)
        for title, rows in (
            ("Keys", [(f"`{key.label}`", key.help) for key in KEYS]),
            ("Verdicts", [(f"`{mark}`", text) for mark, _, text in MARKS]),
            ("Tokens", [(kind, text) for kind, _, text in COLOURS]),
            ("Figures of a node", named),
            ("Figures of a run", RATES),
            ("Keys of the breakpoints", _named(keys_of(PointsScreen))),
            ("Keys of `compare --screen`: pairs", _named(keys_of(CompareScreen))),
            ("Keys of two runs beside each other: a pair, a fork", _named(keys_of(BesideScreen))),
            ("Keys of `diagnose --only locate --screen`: operations", _named(keys_of(LocateScreen))),
            ("Keys of `diagnose --only locate --screen`: one operation", _named(keys_of(HeldScreen))),
            ("Figures of `diagnose --only locate --screen`", _named((*MEANS, *BARS))),
        )
    )


def _named(rows):
    return [(f"`{name}`", text) for name, _, text in rows]


def table(title, rows):
    """Two columns."""
    lines = [("", ""), ("---", "---"), *rows]
    text = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    return f"\n## {title}\n\n{text}"


if __name__ == "__main__":
    PAGE.write_text(page())
