"""A diagnosis in the terminal: faults, what is unexplained, remarks."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specscope.analyze.diagnose.diagnosis import Diagnosis, Suspect
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

SHOWN = 5  # suspects in full
UNKNOWN = "Something is wrong that fits no known cause"


def render_diagnosis(found: Diagnosis, source: str, console: Console) -> None:
    """Print a diagnosis. Text of models and users is never read as markup."""
    looked = ", ".join(found.looked_at)
    console.print(
        Text(f"{plural(found.steps, 'decode step')} of {printable(source)}; looked at: {looked}", style="dim")
    )
    for line in (*found.left_out, *found.declined):
        console.print(Text(f"! not judged: {printable(line)}", style="yellow"), soft_wrap=True)
    for place, fault in enumerate(found.faults[:SHOWN], 1):
        _fault(place, fault, source, console)
    if len(found.faults) > SHOWN:
        others = ", ".join(fault.cause.label for fault in found.faults[SHOWN:])
        console.print(Text(f"\nless likely: {others}", style="dim"))
    if found.unexplained:
        title = (
            "Also wrong, and not explained by these" if found.faults else "Something is wrong that fits no known cause"
        )
        console.print(Text(f"\n{title}", style="bold red"))
        for line in found.unexplained:
            console.print(Padding.indent(Text(printable(line)), 2))
    if found.beside:
        console.print(Text("\nBeside the good capture", style="bold cyan"))
        for line in found.beside:
            console.print(Padding.indent(Text(printable(line)), 3))
    if found.remarks:
        console.print(Text("\nRemarks", style="bold cyan"))
        for remark in found.remarks:
            _remark(remark, console)
    console.print(_verdict(found))


def _fault(place: int, fault: Suspect, source: str, console: Console) -> None:
    """A cause, what speaks for it and against it, where to look, and the command that shows an example."""
    head = Text(f"\n{place}. {fault.cause.about}", style="bold red")
    console.print(head.append(f"  {fault.cause.label}, {fault.score:.2f}", style="dim"))
    _evidence(fault, console)
    console.print(Padding.indent(Text(f"look at: {fault.cause.look}"), 3))
    console.print(Padding.indent(Text(fault.command(source), style="dim"), 3), soft_wrap=True)


def _remark(remark: Suspect, console: Console) -> None:
    """What acceptance or the text alone speaks for, or an explanation without a fault."""
    alone = "; no check says so: `audit` would tell" if remark.cause.is_fault else ""
    head = Text(f"- {'perhaps ' if remark.cause.is_fault else ''}{remark.cause.about}{alone}", style="cyan")
    console.print(Padding.indent(head.append(f"  {remark.cause.label}", style="dim"), 2))
    _evidence(remark, console)


def _evidence(suspect: Suspect, console: Console) -> None:
    for sign, lines, style in (("+", suspect.for_, "green"), ("-", suspect.against, "yellow")):
        for line in lines:
            console.print(Padding.indent(Text(f"{sign} ", style=style).append(printable(line), style="default"), 3))
    if suspect.chance is not None:
        text = f"chance gives this with less than {max(suspect.chance, 1e-300):.2g}"
        console.print(Padding.indent(Text(f"+ {text}", style="green"), 3))


def _verdict(found: Diagnosis) -> Text:
    """The last line: what is wrong, or what was covered and holds."""
    if found.faults:
        return Text(f"\nMost likely: {found.faults[0].cause.about}.", style="bold red")
    if found.unexplained:
        return Text("\nThe run is not consistent, and no cause is named.", style="bold red")
    if not found.steps:
        return Text("\nNothing to judge: the capture has no decode step.", style="bold yellow")
    covered = f"No fault found by {', '.join(found.looked_at[1:])} over {plural(found.steps, 'decode step')}"
    if found.left_out or found.declined:
        return Text(f"\n{covered}; what could not be judged is named above.", style="bold yellow")
    return Text(f"\n{covered}.", style="bold green")
