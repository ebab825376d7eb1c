"""An audit in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specscope.analyze.audit.audit import Audit, of_drafter, verdict
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.table import Table, count
from specscope.analyze.text import VERDICT, header_block, table_block
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

STYLE = {CheckResult.PASSED: "green", CheckResult.FAILED: "bold red", CheckResult.SKIPPED: "dim"}
SHOWN = 3  # examples of each quantity


def render_audit(audit: Audit, console: Console) -> None:
    """Print an audit. Text of models and users is never read as markup."""
    console.print(header_block(_header(audit)))
    for note in audit.notes:
        console.print(Text(f"! {printable(note)}", style="yellow"))
    console.print(table_block(_table(audit), {result.value: style for result, style in STYLE.items()}))
    for finding in audit.findings:
        if finding.failed:
            _differences(finding, audit, console)
    if audit.unseen:
        console.print(Text(f"\nnote: {printable(audit.unseen)}", style="dim"))
    sentence = printable(verdict(audit.findings, audit.audited, audit.unjudged))
    console.print(Text(f"\n{sentence}", style=VERDICT[audit.exit]))


def _header(audit: Audit) -> tuple[tuple[str, str], ...]:
    drafted = any(of_drafter(finding.name) and finding.tested for finding in audit.findings)
    models = audit.target + (f", drafter {audit.draft_model}" if audit.draft_model and drafted else "")
    steps = plural(audit.steps, "decode step")
    audited = steps if audit.audited == audit.steps else f"{audit.audited:,} of {steps}"
    rounding = f"{audit.slack:.2g} in the target's log odds" + (
        f", {audit.draft_slack:.2g} in the drafter's" if audit.draft_slack else ""
    )
    return (
        ("capture", audit.source),
        ("judged by", f"{models}, plain transformers in float32"),
        ("audited", f"{audited}, {plural(audit.nodes, 'node')} in {audit.seconds:.1f} s"),
        ("rounding", f"{audit.dtype}: up to {rounding}"),
    )


def _table(audit: Audit) -> Table:
    rows = []
    for finding in audit.findings:
        about = printable(finding.about + (f" ({finding.note})" if finding.note else ""))
        rows.append((finding.name, finding.result.value, count(finding.tested), count(finding.failed), about))
    columns = ("judged", "result", "compared", "differ", "what is checked")
    return Table("", columns, rows, words=frozenset(["result", "what is checked"]))


def _differences(finding: Finding, audit: Audit, console: Console) -> None:
    """Print the condition under which items differ, and the first of these."""
    console.print(Text(f"\n{finding.name}", style="bold cyan"))
    if finding.sentence:
        console.print(Text(printable(finding.sentence)))
    if finding.detail and not finding.examples:
        console.print(Text(f"  {finding.example}: {printable(finding.detail)}", style="dim"))
    for example in finding.examples[:SHOWN]:
        console.print(Text(f"  {example.where}: {printable(example.text)}", style="dim"))
    if finding.example is not None:
        console.print(Text(f"  {finding.example.command(audit.source)}", style="dim"), soft_wrap=True)
