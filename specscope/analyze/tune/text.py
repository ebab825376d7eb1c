"""A tuning in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from specscope.analyze.tables import NONE, Table, number, percent
from specscope.analyze.text import table_block
from specscope.analyze.tune.lengths import Length
from specscope.analyze.tune.tuning import TOLD, Row, Tuning
from specscope.trace.vocabulary import printable
from specscope.trace.wording import plural

BAR = 24  # characters


def render_tuning(tuning: Tuning, console: Console) -> None:
    """Print it. Text of captures is never read as markup, and holds no control characters."""
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in header(tuning):
        grid.add_row(name, Text(printable(value)))
    console.print(grid)
    for warning in tuning.warnings:
        console.print(Text(f"! {printable(warning)}", style="yellow"))
    for table in tables(tuning):
        console.print(table_block(table))
    for note in tuning.notes:
        console.print(Text(f"– {printable(note)}", style="dim"))
    console.print()
    console.print(Text(advice(tuning), style="bold green" if tuning.choice else "bold"))


def header(tuning: Tuning) -> list[tuple[str, str]]:
    """What was judged: (name, value) pairs."""
    counts = f"{plural(tuning.steps, 'step')} with drafts, {plural(tuning.requests, 'request')}"
    lines = [("source", ", ".join(tuning.sources)), *tuning.run.items(), ("recorded", counts)]
    if tuning.costs is not None:
        machine = ", ".join(tuning.costs.machine.values())
        lines += [
            ("costs", f"batch {tuning.costs.batch}, contexts of about {tuning.costs.context} tokens"),
            ("", machine),
        ]
    return [(name, value) for name, value in lines if value]


def tables(tuning: Tuning) -> list[Table]:
    """Named trees, and the best of each size."""
    named = [row for row in tuning.rows if row.names or row.family == "asked"]
    named.sort(key=lambda row: -_value(row))
    most = max(map(_value, tuning.rows))
    note = f"The run itself had {number(tuning.recorded_length)}. Intervals are at 95 %."
    if any(row.untold > TOLD for row in tuning.rows):
        note += f" ~: more than {percent(TOLD)} rests on assumptions (acceptance by rank and depth beyond the record)."
    found = [_table("Trees", named, tuning, most, note)]
    families = {family: tuning.family(family) for family in ("static", "dynamic")}
    return found + [
        _table(f"The best {family} tree of each size", rows, tuning, most, "")
        for family, rows in families.items()
        if rows
    ]


def _table(title: str, rows: list[Row], tuning: Tuning, most: float, note: str) -> Table:
    checked = any(row.measured is not None for row in rows)
    columns = ["tree", "nodes", "depth", "length", "95 %"]
    columns += ["ms/step", "tok/s", "95 % "] if tuning.costs is not None else []
    columns += ["measured", "length ", "error"] if checked else []
    made = [(*_cells(row, tuning, checked=checked), _bar(_value(row), most)) for row in rows]
    return Table(title, (*columns, ""), made, note, words=frozenset({""}), narrowed=frozenset({"tree"}))


def _cells(row: Row, tuning: Tuning, *, checked: bool) -> tuple[str, ...]:
    name = row.tree or "no drafting"
    title = f"{', '.join(row.names)}: {name}" if row.names and row.tree else name
    mark = "~" if row.untold > TOLD else ""
    cells = [title, number(row.nodes, 1), str(row.depth), mark + number(row.length.value), interval(row.length, 2)]
    if tuning.costs is not None and row.speed is not None:
        cells += [number((row.step or 0) * 1e3, 1), mark + number(row.speed.value, 1), interval(row.speed, 1)]
    if checked:
        error = None if row.measured is None or row.speed is None else row.speed.value / row.measured - 1
        told = NONE if error is None else f"{error:+.1%}"
        cells += [number(row.measured, 1), number(row.measured_length), told]
    return tuple(cells)


def interval(length: Length, digits: int) -> str:
    """1.80–1.95"""
    if length.low is None or length.high is None:
        return NONE
    return f"{number(length.low, digits)}–{number(length.high, digits)}"


def _value(row: Row) -> float:
    return row.length.value if row.speed is None else row.speed.value


def _bar(value: float, most: float) -> str:
    return "▇" * round(BAR * value / most)


def advice(tuning: Tuning) -> str:
    """The one line to act on."""
    choice, default = tuning.choice, tuning.named("default")
    if choice is None:
        return "Give costs to choose by tokens/s: leave out --no-costs, or give --costs FILE."
    if choice.family == "plain":
        return f"No drafting is predicted to be fastest ({_speed(choice)} tokens/s): --drafter none"
    tree = choice.tree if " " not in choice.tree else f'"{choice.tree}"'
    than = ""
    if default is not None and default.speed is not None and choice.speed is not None and default is not choice:
        than = f", {choice.speed.value / default.speed.value - 1:+.1%} over the default {default.tree}"
    return f"Recommended: --tree {tree}   {_speed(choice)} tokens/s predicted{than}"


def _speed(row: Row) -> str:
    return NONE if row.speed is None else number(row.speed.value, 1)
