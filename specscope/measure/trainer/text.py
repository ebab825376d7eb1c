"""A comparison of training and serving in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from specscope.analyze.audit.text import VERDICT
from specscope.analyze.locate.located import Held
from specscope.analyze.questions.groups import Share
from specscope.analyze.table import NONE, Table, count
from specscope.analyze.text import table_block
from specscope.measure.trainer.audit import TrainerAudit
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

NOTE = (
    "training and served: at how many of the same places the head's choice is the target's greedy token, after the\n"
    "text's own tokens; recorded: of the drafts accepted down to the depth above, those accepted there too; in\n"
    "brackets Wilson's 95 % interval"
)


def render_trainer(audit: TrainerAudit, console: Console) -> None:
    """Print it. Text of models and users is never read as markup."""
    console.print(_header(audit))
    for note in audit.notes:
        console.print(Text(f"! {printable(note)}", style="yellow"))
    if audit.rates:
        console.print(table_block(_rates(audit)))
    console.print(table_block(_walk(audit), {"differs": "bold red", "agrees": "green"}))
    for located in audit.location.located:
        console.print(Text(f"\n{printable(located.operation.name)}", style="bold cyan"))
        console.print(Text(printable(located.sentence)))
        for line in (located.looks and f"looks like {located.looks}", located.smallest, located.operation.code):
            if line:
                console.print(Text(f"  {printable(line)}", style="dim"))
    console.print(Text(f"\n{printable(audit.verdict)}", style=VERDICT[audit.exit]))


def _header(audit: TrainerAudit) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    places = (
        f"{audit.places:,} of {plural(audit.available, 'place')}"
        if audit.places < audit.available
        else (plural(audit.places, "place"))
    )
    for name, value in (
        ("capture", audit.source),
        ("in training", f"{audit.trainer}: {audit.reference}"),
        ("served", f"{audit.served}: specscope's engine, float32"),
        ("compared", f"{places} of {plural(audit.requests, 'request')} in {audit.location.seconds:.1f} s"),
    ):
        grid.add_row(name, Text(printable(value)))
    return grid


def _rates(audit: TrainerAudit) -> Table:
    rows = []
    for rates in audit.rates:
        shares = (rates.training, rates.served, rates.recorded)
        cells = [cell for share in shares for cell in (_rate(share), count(share.total))]
        rows.append((str(rates.depth), *cells))
    columns = ("depth", "training", "places", "served", "places", "recorded", "drafts")
    return Table("Acceptance by depth", columns, rows, note=NOTE)


def _rate(share: Share) -> str:
    if share.value is None or share.interval is None:
        return NONE
    low, high = share.interval
    return f"{share.value:.3f} [{low:.2f}, {high:.2f}]"


def _walk(audit: TrainerAudit) -> Table:
    """The operations of the walk: those before the first that differs together, by depth; --json has each."""
    held = [held for walk in audit.location.walks for held in walk.operations]
    first = next((index for index, x in enumerate(held) if x.differs), len(held))
    groups: dict[str, list[Held]] = {}
    for agreeing in held[:first]:
        name = agreeing.operation.name
        groups.setdefault(".".join(name.split(".")[:2]) if name.startswith("depth") else "features", []).append(
            agreeing
        )
    rows = [_row(f"{name}: {plural(len(some), 'operation')}", some) for name, some in groups.items()]
    rows += [_row(x.operation.name, [x]) for x in held[first:]]
    columns = ("operation", "result", "error", "rounding", "rows", "differ")
    return Table("Operations, in the order of computing", columns, rows, words=frozenset(["result"]))


def _row(name: str, held: Sequence[Held]) -> tuple[str, ...]:
    error, allowed, rows = (max(getattr(x, part) for x in held) for part in ("error", "allowed", "rows"))
    differing = sum(x.differing for x in held)
    return (name, "differs" if differing else "agrees", f"{error:.1e}", f"{allowed:.0e}", count(rows), count(differing))
