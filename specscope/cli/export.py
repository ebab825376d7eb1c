"""`specscope export`: captures as Parquet tables."""

from __future__ import annotations

import click

from specscope.cli.captures import captures_argument, fetches_captures, need_different, reading_bar
from specscope.cli.streams import say, warn
from specscope.trace.history.wording import plural
from specscope.trace.stored import as_runs


@click.command()
@captures_argument
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder for the tables.")
@fetches_captures
def export(captures: tuple[str, ...], output: str) -> None:
    """Write captures as Parquet tables, for pandas, DuckDB and other tools.

    \b
      specscope export run.jsonl -o tables
      duckdb -c "SELECT depth, outcome, count(*) FROM 'tables/nodes.parquet' GROUP BY ALL"

    DIR holds runs, requests, steps (one row for each request and step), nodes (one for each drafted token), finals
    (the token that ended each decode step), tokens (texts) and intervals (of captures that hold counts only). The
    columns `capture`, `step` and `request` join them. The files describe their columns.

    DIR must be new, empty, or an older export, which is replaced. Needs pip install 'specscope[export]'.
    """
    from specscope.analyze.export.exporting import export as write

    need_different(captures)
    with reading_bar("exporting") as progress:
        written = write(as_runs(captures), output, progress)
    for warning in written.warnings:
        warn(warning)
    counts = (plural(count, name.removesuffix("s")) for name, count in written.rows.items() if count)
    say(f"wrote {output}: {', '.join(counts)}")
