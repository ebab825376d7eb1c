"""A diagnosis in the terminal: faults, what is unexplained, remarks."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specscope.analyze.diagnose.diagnosis import Diagnosis, Grade, PlacedFault, Suspect
from specscope.analyze.findings import Exit
from specscope.analyze.locate.text import render_lines, render_located
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

SHOWN = 5  # suspects in full
UNKNOWN = "Something is wrong, and no known cause fits"
NOT_LOCATED = "Something is wrong, and it was not located"


def render_diagnosis(diagnosis: Diagnosis, source: str, console: Console) -> None:
    """Print a diagnosis. Text of models and users is never read as markup."""
    looked = ", ".join(diagnosis.looked_at[1:])
    steps = plural(diagnosis.steps, "decode step")
    console.print(Text(f"{steps} of {printable(source)}; checked by {looked}", style="dim"))
    if diagnosis.builds:
        console.print(Text(printable(diagnosis.builds), style="dim"))
    for line in (*(f"not judged: {line}" for line in diagnosis.left_out), *diagnosis.declined):
        console.print(Text(f"! {printable(line)}", style="yellow"), soft_wrap=True)
    faults = diagnosis.placed
    for number, fault in enumerate(faults[:SHOWN], 1):
        _fault(number, fault, source, console)
    shown = {id(fault.cause) for fault in faults[:SHOWN]}
    if others := [fault.cause.label for fault in diagnosis.faults if id(fault) not in shown]:
        console.print(Text(f"\nless likely: {', '.join(others)}", style="dim"))
    render_lines("When it happens", diagnosis.when, console)
    if diagnosis.unexplained:
        title = "Also wrong, and unexplained" if faults else NOT_LOCATED if diagnosis.ruled_out else UNKNOWN
        console.print(Text(f"\n{title}", style="bold red"))
        for line in diagnosis.unexplained:
            console.print(Padding.indent(Text(printable(line)), 2))
    render_lines("Ruled out", diagnosis.ruled_out, console)
    if diagnosis.exit is not Exit.INCONSISTENT:
        title = "Statistical checks miss biases smaller than these"
        render_lines(title, diagnosis.would_see, console)
    if diagnosis.remarks:
        console.print(Text("\nRemarks", style="bold cyan"))
    for remark in diagnosis.remarks:
        head = Text(f"- {remark.cause.about}", style="cyan")
        console.print(Padding.indent(head.append(f"  {remark.cause.label}", style="dim"), 2))
        _evidence(remark, "", console)
    for line in diagnosis.notes:
        console.print(Text(f"\nnote: {printable(line)}", style="dim"))
    console.print(_verdict(diagnosis))


def _fault(number: int, fault: PlacedFault, source: str, console: Console) -> None:
    """A fault: its place, or the evidence for its cause, and the command that shows an example."""
    place, cause = fault.place, fault.cause
    head = Text(f"\n{number}. {printable(_title(fault))}", style="bold red")
    if cause is not None:  # its grade, with the counts where it has some
        sure = f"{cause.grade.value}: {cause.explained:,} of {cause.of:,}" if cause.of else cause.grade.value
        head.append(f" ({cause.cause.label}; {sure})", style="dim")
    console.print(head)
    if place is not None:
        render_located(place, source, console)
    if cause is not None:
        _evidence(cause, "" if place is None else place.sentence, console)
        console.print(Padding.indent(Text(f"Check {cause.cause.look}."), 3))
        if place is None or place.where is None:
            console.print(Padding.indent(Text(cause.command(source), style="dim"), 3), soft_wrap=True)


def _title(fault: PlacedFault) -> str:
    """Its familiar name, its place, or both."""
    names = [] if fault.cause is None else [fault.cause.cause.about]
    return ": ".join(names + ([] if fault.place is None else [fault.place.operation.words]))


def _evidence(suspect: Suspect, said: str, console: Console) -> None:
    """The lines for a cause, but for what was said with its place."""
    chance = max(suspect.chance or 0, 1e-300)
    more = [f"chance alone would give this with a probability below {chance:.2g}"] * (suspect.chance is not None)
    for line in (*suspect.for_, *more):
        if line != said:
            console.print(Padding.indent(Text("+ ", style="green").append(printable(line), style="default"), 3))


def _verdict(diagnosis: Diagnosis) -> Text:
    """The last line: what is wrong, or what was covered and holds."""
    if faults := diagnosis.placed:
        first, title = faults[0], printable(_title(faults[0]))
        sure = "Most likely" if first.place is None else "Located" if first.place.certain else "Located as a region"
        is_alone = len(faults) == 1 and first.place is None
        proven = is_alone and first.cause is not None and first.cause.grade is Grade.PROVEN
        return Text(f"\n{title[0].upper()}{title[1:]}." if proven else f"\n{sure}: {title}.", style="bold red")
    if diagnosis.unexplained:
        return Text("\nThe run is not consistent, and no cause is named.", style="bold red")
    if not diagnosis.steps:
        return Text("\nNothing to judge: the capture has no decode step.", style="bold yellow")
    covered = f"No fault found by {', '.join(diagnosis.looked_at[1:])} over {plural(diagnosis.steps, 'decode step')}"
    if diagnosis.left_out or diagnosis.declined:
        return Text(f"\n{covered}; what could not be judged is named above.", style="bold yellow")
    return Text(f"\n{covered}.", style="bold green")
