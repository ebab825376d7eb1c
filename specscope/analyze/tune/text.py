"""A tuning in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specscope.analyze.table import NONE, Table, number, percent
from specscope.analyze.text import render_page
from specscope.analyze.tune.judged import Length, TreeRow
from specscope.analyze.tune.tuning import TOLD, Tuning
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

NAMED, TREE = "Trees", frozenset(["tree"])


def render_tuning(tuning: Tuning, console: Console) -> None:
    """Print it. Text of captures is never read as markup, and holds no control characters."""
    render_page(console, header(tuning), tuning.warnings, tables(tuning))
    for note in tuning.notes:
        console.print(Text(f"– {printable(note)}", style="dim"))
    console.print()
    console.print(Text(advice(tuning), style="bold green" if tuning.choice else "bold"))


def header(tuning: Tuning) -> list[tuple[str, str]]:
    counts = f"{plural(tuning.steps, 'step')} with drafts, {plural(tuning.requests, 'request')}"
    lines = [("source", ", ".join(tuning.sources)), *tuning.run.items(), ("recorded", counts)]
    if tuning.costs is not None:
        machine, context = ", ".join(tuning.costs.machine.values()), tuning.costs.about.get("context") or "some"
        lines += [("costs", f"batch {tuning.costs.batch}, contexts of about {context} tokens"), ("", machine)]
    return [(name, value) for name, value in lines if value]


def tables(tuning: Tuning) -> list[Table]:
    """Named trees, and the best of each size."""
    named = [row for row in tuning.rows if row.names or row.family == "asked"]
    named.sort(key=lambda row: -row.rate)
    note = f"The run itself had {number(tuning.recorded_length)}. Intervals: 95 %."
    if any(row.untold > TOLD for row in tuning.rows):
        note += f" ~: more than {percent(TOLD)} rests on assumptions (acceptance at unrecorded ranks and depths)."
    if tuning.checked:
        note += f" Measured on {tuning.checked['prompts']}; expected: at the step costs measured meanwhile."
    groups = [(NAMED, named)]
    groups += [(f"The best {family} tree of each size", tuning.family(family)) for family in ("static", "dynamic")]
    shown: list[Table] = []
    for title, rows in groups:
        if cells := [_cells(row, tuning, title) for row in rows]:  # the recorded tree may be none that can be read
            shown.append(Table(title, tuple(cells[0]), [tuple(c.values()) for c in cells], "" if shown else note, TREE))
    return shown


def _cells(row: TreeRow, tuning: Tuning, title: str) -> dict[str, str]:
    mark = "~" if row.untold > TOLD else ""
    cells = {"nodes": number(row.nodes, int(row.nodes % 1 > 0)), "depth": str(row.depth)}
    cells |= {"length": mark + number(row.length.value), "95 %": interval(row.length, 2)}
    if row.speed is not None:
        cells["ms/step"], cells["tok/s"] = number((row.step or 0) * 1e3, 1), mark + number(row.speed.value, 1)
        cells["95 % "] = interval(row.speed, 1)
    if tuning.checked and title == NAMED:
        cells["expected"], cells["measured"] = number(row.expected, 1), number(row.measured, 1)
        cells["length "] = number(row.measured_length)
        cells["error"] = NONE if row.error is None else f"{row.error:+.1%}"
    return cells | {"tree": _title(row)}  # last: nothing is padded to the longest


def _title(row: TreeRow) -> str:
    name = printable(row.tree or "no drafting")
    return f"{name}  {', '.join(row.names)}" if row.names and row.tree else name


def interval(length: Length, digits: int) -> str:
    """1.80–1.95"""
    if length.low is None or length.high is None:
        return NONE
    return f"{number(length.low, digits)}–{number(length.high, digits)}"


def advice(tuning: Tuning) -> str:
    """The one line to act on."""
    choice, default = tuning.choice, tuning.named("default")
    if choice is None:
        return "No tree is recommended: without costs the tokens/s are unknown."
    beside = ""
    if default is not None and choice.over_default is not None:
        beside = f", {_gain(choice.over_default, f'the default {default.tree}')}"
    if choice.family == "plain":
        return f"No drafting is predicted to be fastest, at {_speed(choice)} tokens/s{beside}: --drafter none"
    tree = choice.tree if " " not in choice.tree else f'"{choice.tree}"'
    line = f"Recommended: --tree {tree}   {_speed(choice)} tokens/s predicted{beside}"
    if choice.measured is not None:
        line += f"; {number(choice.measured, 1)} measured"
        known = default is not None and default is not choice and default.measured
        line += f", {choice.measured / known - 1:+.1%} over it" if known else ""
    return line


def _gain(ratio: Length, over: str) -> str:
    """How much faster than another tree, with the interval; one that holds 1 shows no difference."""
    line = f"{ratio.value - 1:+.1%} over {over}"
    if ratio.low is None or ratio.high is None:
        return line
    same = ", about the same" if ratio.low <= 1 <= ratio.high else ""
    return f"{line} (between {ratio.low - 1:+.1%} and {ratio.high - 1:+.1%}{same})"


def _speed(row: TreeRow) -> str:
    return NONE if row.speed is None else number(row.speed.value, 1)
