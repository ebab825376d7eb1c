"""A location in the terminal: faults with their places, the walk around the first difference, what was ruled out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specscope.analyze.locate.located import Held, Located, Location, Walk
from specscope.analyze.table import Table, count
from specscope.analyze.text import VERDICT, TableBlock
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

BEFORE, AFTER = 4, 2  # operations that are shown around the first that differs
AGREES, DIFFERS = "✓", "✗"
STYLE = {AGREES: "green", DIFFERS: "bold red"}
INDENT = 3


def render_location(location: Location, console: Console) -> None:
    """Print a location. Text of models and users is never read as markup."""
    walks = plural(len(location.walks), "walk")
    console.print(Text(f"{printable(location.source)}: {walks} in {location.seconds:.1f} s", style="dim"))
    for line in location.left_out:
        console.print(Text(f"! not judged: {printable(line)}", style="yellow"), soft_wrap=True)
    for place, located in enumerate(location.located, 1):
        console.print(Text(f"\n{place}. {printable(located.operation.words)}", style="bold red"))
        render_located(located, location.source, console)
    for walk in location.walks:
        _walk(walk, console)
    render_lines("Different, without a place", location.without_place, console, "bold red")
    render_lines("Ruled out", location.ruled_out, console)
    console.print(Text(f"\n{printable(verdict(location))}", style=VERDICT[location.exit]))


def render_located(located: Located, source: str, console: Console) -> None:
    """A fault with its place, without its title: where it is, how it differs, what shows it."""
    operation = located.operation
    region = "" if located.certain else ", or near it: a region, not one operation"
    _line(f"{operation.stage.value}: {operation.name}{region}", "cyan", console)
    _line(located.sentence, "", console)
    told = {"looks like": located.looks, "computed in": operation.code, "smallest input": located.smallest}
    for name, text in (told | {"next best": located.runner_up}).items():
        if text:
            _line(f"{name}: {text}", "", console)
    if located.differing:
        _line(f"explains {explained(located)}", "", console)
    if located.where is not None:
        console.print(Padding.indent(Text(located.where.command(source), style="dim"), INDENT), soft_wrap=True)


def render_lines(title: str, lines: Sequence[str], console: Console, style: str = "bold cyan") -> None:
    """What agrees, for one: a line each under a title; nothing where there are none."""
    if lines:
        console.print(Text(f"\n{title}", style=style))
    for line in lines:
        _line(line, "", console)


def explained(located: Located) -> str:
    """`12 of 14 rows that differ`."""
    return f"{located.explained:,} of {plural(located.differing, located.unit)} that differ" + (
        "s" if located.differing == 1 else ""
    )


def verdict(location: Location) -> str:
    if location.located:
        first, *others = location.located
        rest = f"; {plural(len(others), 'other fault')} above" if others else ""
        share = f", which explains {explained(first)}" if first.differing else ""
        near = "Located" if first.certain else "Located as a region"
        return f"{near}: {first.operation.words}{share}{rest}."
    if location.without_place:
        return f"Not located: {plural(len(location.without_place), 'difference')} without a place."
    operations = sum(len(walk.operations) for walk in location.walks)
    walked = f"{plural(operations, 'operation')} in {plural(len(location.walks), 'walk')} agree"
    ruled = f"{plural(len(location.ruled_out), 'comparison')} above, each with its count, agree"
    covered = "; ".join([walked] * bool(operations) + [ruled] * bool(location.ruled_out)) or "nothing was compared"
    left_out = "; what could not be judged is named above" if location.left_out else ""
    return f"Nothing differs: {covered}{left_out}."


def error_text(value: float) -> str:
    """A relative error in two digits, `4.2e-01`; 0 where there is none."""
    return "0" if value == 0 else f"{value:.1e}"


def _walk(walk: Walk, console: Console) -> None:
    """A table of the operations around the first that differs; a line where none does."""
    title = printable(f"Walk of the {walk.stage.value} at {walk.where}: {walk.sides}")
    first = walk.first
    if first is None:
        rows = max((held.rows for held in walk.operations), default=0)
        agree = f"{plural(len(walk.operations), 'operation')} over {plural(rows, 'row')}: all agree"
        console.print(Text(f"\n{title}", style="bold cyan"))
        console.print(Text(f"{AGREES} {agree}", style="green"))
        return
    begin, rest = max(first - BEFORE, 0), walk.operations[first + 1 + AFTER :]
    cells = [_cells(held) for held in walk.operations[begin : first + 1 + AFTER]]
    agree, wrong = "all agree" if begin > 1 else "agrees", sum(held.differs for held in rest)
    folded = [f"Before these: {plural(begin, 'operation')}, {agree}."] if begin else []
    after = f"After these: {plural(len(rest), 'operation')}, {wrong:,} of them off by more than allowed."
    folded += [after] if rest else []
    columns, words = ("operation", "", "error", "allowed", "differ"), frozenset({"operation", ""})
    console.print(TableBlock(Table(title, columns, cells, " ".join(folded), words), STYLE))


def _cells(held: Held) -> tuple[str, ...]:
    """What it is, whether it agrees, its error, what is allowed and how many rows are off."""
    return (
        printable(held.operation.words),
        DIFFERS if held.differs else AGREES,
        error_text(held.error),
        error_text(held.allowed),
        f"{count(held.differing)} of {plural(held.rows, 'row')}",
    )


def _line(text: str, style: str, console: Console) -> None:
    console.print(Padding.indent(Text(printable(text), style=style), INDENT))
