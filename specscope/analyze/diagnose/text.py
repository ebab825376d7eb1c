"""A diagnosis in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specscope.analyze.diagnose.diagnosis import Diagnosis, Suspect
from specscope.analyze.findings import Exit
from specscope.trace.vocabulary import printable
from specscope.trace.wording import plural

SHOWN = 5  # suspects in full
VERDICT = {
    Exit.CONSISTENT: "No fault found.",
    Exit.NOT_JUDGED: "Nothing to judge: the capture has no decode step.",
}


def render_diagnosis(found: Diagnosis, source: str, console: Console) -> None:
    """Print a diagnosis. Text of models and users is never read as markup."""
    looked = ", ".join(found.looked_at)
    console.print(
        Text(f"{plural(found.steps, 'decode step')} of {printable(source)}; looked at: {looked}", style="dim")
    )
    for line in found.left_out:
        console.print(Text(f"! left out: {printable(line)}", style="yellow"))
    for place, one in enumerate(found.suspects[:SHOWN], 1):
        _suspect(place, one, source, console)
    if len(found.suspects) > SHOWN:
        others = ", ".join(one.cause.label for one in found.suspects[SHOWN:])
        console.print(Text(f"\nless likely: {others}", style="dim"))
    if found.unexplained:
        console.print(Text("\nSomething is wrong that fits no known cause", style="bold red"))
        for line in found.unexplained:
            console.print(Padding(Text(printable(line)), (0, 0, 0, 2)))
    if found.beside:
        console.print(Text("\nBeside the good capture", style="bold cyan"))
        for line in found.beside:
            console.print(Padding(Text(printable(line)), (0, 0, 0, 3)))
    console.print(_verdict(found))


def _suspect(place: int, one: Suspect, source: str, console: Console) -> None:
    """A cause, what speaks for it and against it, where to look, and the command that shows an example."""
    style = "bold red" if one.cause.is_fault else "bold cyan"
    head = Text(f"\n{place}. {one.cause.about}", style=style)
    console.print(head.append(f"  {one.cause.label}, {one.score:.2f}", style="dim"))
    for sign, lines, style in (("+", one.for_, "green"), ("-", one.against, "yellow")):
        for line in lines:
            console.print(Padding(Text(f"{sign} ", style=style).append(printable(line), style="default"), (0, 0, 0, 3)))
    console.print(Padding(Text(f"look at: {one.cause.look}"), (0, 0, 0, 3)))
    console.print(Padding(Text(one.command(source), style="dim"), (0, 0, 0, 3)), soft_wrap=True)


def _verdict(found: Diagnosis) -> Text:
    if found.faults:
        return Text(f"\nMost likely: {found.faults[0].cause.about}.", style="bold red")
    if found.unexplained:
        return Text("\nThe run is not consistent, and no cause is named.", style="bold red")
    return Text(f"\n{VERDICT[found.exit]}", style="bold green" if found.steps else "bold yellow")
