"""An audit in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.tally import Finding
from specscope.analyze.findings import Exit, Result
from specscope.trace.vocabulary import printable
from specscope.trace.wording import plural

STYLE = {Result.PASSED: "green", Result.FAILED: "bold red", Result.SKIPPED: "dim"}
VERDICT = {
    Exit.CONSISTENT: "The run agrees with its models.",
    Exit.INCONSISTENT: "The run does not agree with its models.",
    Exit.NOT_JUDGED: "Nothing could be judged.",
}
SHOWN = 3  # examples of each quantity


def render_audit(found: Audit, console: Console) -> None:
    """Print an audit. Text of models and users is never read as markup."""
    console.print(_header(found))
    for note in found.notes:
        console.print(Text(f"! {printable(note)}", style="yellow"))
    console.print(Text(""))
    console.print(_table(found))
    for finding in found.findings:
        if finding.check.failed:
            _differences(finding, found, console)
    style = "bold green" if found.exit is Exit.CONSISTENT else "bold red"
    console.print(Text(f"\n{VERDICT[found.exit]}", style=style))


def _header(found: Audit) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    models = found.target + (f", drafter {found.draft_model}" if found.draft_model else "")
    steps = plural(found.steps, "decode step")
    audited = steps if found.audited == found.steps else f"{found.audited:,} of {steps}"
    rounding = f"{found.slack:.2g} in the target's log odds" + (
        f", {found.draft_slack:.2g} in the drafter's" if found.draft_slack else ""
    )
    for name, value in (
        ("capture", found.source),
        ("judged by", f"{models}, {found.judge}"),
        ("audited", f"{audited}, {plural(found.nodes, 'node')} in {found.seconds:.1f} s"),
        ("rounding", f"{found.dtype}: up to {rounding}"),
    ):
        grid.add_row(name, Text(printable(value)))
    return grid


def _table(found: Audit) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("judged", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("compared", justify="right", no_wrap=True)
    table.add_column("differ", justify="right", no_wrap=True)
    table.add_column("what is checked", overflow="fold")
    for finding in found.findings:
        check = finding.check
        about = check.about + (f" ({check.note})" if check.note else "")
        table.add_row(
            check.name,
            Text(check.result.value, style=STYLE[check.result]),
            f"{check.tested:,}",
            f"{check.failed:,}",
            Text(printable(about)),
        )
    return table


def _differences(finding: Finding, found: Audit, console: Console) -> None:
    """What tells those that differ, and the first of them."""
    console.print(Text(f"\n{finding.check.name}", style="bold cyan"))
    if finding.sentence:
        console.print(Text(printable(finding.sentence)))
    for example in finding.examples[:SHOWN]:
        console.print(Text(f"  {example.where}: {printable(example.text)}", style="dim"))
    if finding.check.example is not None:
        console.print(Text(f"  {finding.check.example.command(found.source)}", style="dim"), soft_wrap=True)
