"""A diagnosis in the terminal: faults, what is unexplained, remarks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specscope.analyze.diagnose.diagnosis import Diagnosis, PlacedFault, Suspect
from specscope.analyze.findings import Exit
from specscope.analyze.locate.text import render_lines, render_located
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

SHOWN = 5  # suspects in full
UNKNOWN = "Something is wrong that fits no known cause"
NOT_LOCATED = "Something is wrong, and it was not located"


def render_diagnosis(diagnosis: Diagnosis, source: str, console: Console) -> None:
    """Print a diagnosis. Text of models and users is never read as markup."""
    looked = ", ".join(diagnosis.looked_at)
    console.print(
        Text(f"{plural(diagnosis.steps, 'decode step')} of {printable(source)}; looked at: {looked}", style="dim")
    )
    if diagnosis.builds:
        console.print(Text(printable(diagnosis.builds), style="dim"))
    for line in (*diagnosis.left_out, *diagnosis.declined):
        console.print(Text(f"! not judged: {printable(line)}", style="yellow"), soft_wrap=True)
    faults = diagnosis.placed
    for number, fault in enumerate(faults[:SHOWN], 1):
        _fault(number, fault, source, console)
    shown = {id(fault.cause) for fault in faults[:SHOWN]}
    if others := [fault.cause.label for fault in diagnosis.faults if id(fault) not in shown]:
        console.print(Text(f"\nless likely: {', '.join(others)}", style="dim"))
    render_lines("When it happens", diagnosis.when, console)
    if diagnosis.unexplained:
        title = "Also wrong, and not explained by these" if faults else NOT_LOCATED if diagnosis.ruled_out else UNKNOWN
        console.print(Text(f"\n{title}", style="bold red"))
        for line in diagnosis.unexplained:
            console.print(Padding.indent(Text(printable(line)), 2))
    render_lines("Ruled out", diagnosis.ruled_out, console)
    if diagnosis.exit is not Exit.INCONSISTENT:
        render_lines(
            "What chance decides may be off by less than each check would have seen", diagnosis.would_see, console
        )
    if diagnosis.remarks:
        console.print(Text("\nRemarks", style="bold cyan"))
        for remark in diagnosis.remarks:
            _remark(remark, console)
    for line in diagnosis.notes:
        console.print(Text(f"\nnote: {printable(line)}", style="dim"))
    console.print(_verdict(diagnosis))


def _fault(number: int, fault: PlacedFault, source: str, console: Console) -> None:
    """A fault: its place, or the evidence for and against its cause, and the command that shows an example."""
    place, cause = fault.place, fault.cause
    head = Text(f"\n{number}. {printable(_title(fault))}", style="bold red")
    console.print(head if cause is None else head.append(f"  {cause.cause.label}, {_sure(cause)}", style="dim"))
    if place is not None:
        render_located(place, source, console)
    if cause is not None:
        _evidence(cause, console, said=() if place is None else (place.sentence,))
        console.print(Padding.indent(Text(f"look at: {cause.cause.look}"), 3))
        if place is None or place.where is None:
            console.print(Padding.indent(Text(cause.command(source), style="dim"), 3), soft_wrap=True)


def _sure(cause: Suspect) -> str:
    """Its grade, with the counts where it has some."""
    return f"{cause.grade.value}: {cause.all_explained:,} of {cause.of:,}" if cause.of else cause.grade.value


def _title(fault: PlacedFault) -> str:
    """Its familiar name, its place, or both."""
    name = "" if fault.cause is None else fault.cause.cause.about
    if fault.place is None:
        return name
    return f"{name}: {fault.place.operation.words}" if name else fault.place.operation.words


def _remark(remark: Suspect, console: Console) -> None:
    """An explanation without a fault."""
    head = Text(f"- {remark.cause.about}", style="cyan")
    console.print(Padding.indent(head.append(f"  {remark.cause.label}", style="dim"), 2))
    _evidence(remark, console)


def _evidence(suspect: Suspect, console: Console, said: Sequence[str] = ()) -> None:
    """The lines for and against a cause, but for those that were said with its place."""
    for sign, lines, style in (("+", suspect.for_, "green"), ("-", suspect.against, "yellow")):
        for line in (line for line in lines if line not in said):
            console.print(Padding.indent(Text(f"{sign} ", style=style).append(printable(line), style="default"), 3))
    if suspect.chance is not None:
        text = f"chance gives this with less than {max(suspect.chance, 1e-300):.2g}"
        console.print(Padding.indent(Text(f"+ {text}", style="green"), 3))


def _verdict(diagnosis: Diagnosis) -> Text:
    """The last line: what is wrong, or what was covered and holds."""
    if faults := diagnosis.placed:
        first = faults[0]
        sure = "Most likely" if first.place is None else "Located" if first.place.certain else "Located as a region"
        return Text(f"\n{sure}: {printable(_title(first))}.", style="bold red")
    if diagnosis.unexplained:
        return Text("\nThe run is not consistent, and no cause is named.", style="bold red")
    if not diagnosis.steps:
        return Text("\nNothing to judge: the capture has no decode step.", style="bold yellow")
    covered = f"No fault found by {', '.join(diagnosis.looked_at[1:])} over {plural(diagnosis.steps, 'decode step')}"
    if diagnosis.left_out or diagnosis.declined:
        return Text(f"\n{covered}; what could not be judged is named above.", style="bold yellow")
    return Text(f"\n{covered}.", style="bold green")
