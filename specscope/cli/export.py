"""`specscope export`: captures as Parquet tables or as a page, or a part of one as a capture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specscope.cli.captures import need_different, need_steps, read_shown, reading_bar, source_options
from specscope.cli.help import verb
from specscope.cli.options import PLACE, X_RULE, asked_privacy, flag, no_clobber_option, privacy_options
from specscope.cli.streams import say, warn
from specscope.errors import UserError
from specscope.trace.extract import part_of, write_part
from specscope.trace.files import CAPTURE, PAGE, Existing, check_output
from specscope.trace.history.wording import plural
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.vocabulary import printable
from specscope.trace.stored import CaptureSource, as_runs
from specscope.trace.wire.reading import read_capture, split_file

if TYPE_CHECKING:
    from specscope.page.write import PageRun

PART = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PAGES = (".html", ".htm")
FORMS = (
    "give a folder for Parquet tables, a name in .html for a page, or one in .jsonl, .jsonl.gz or .jsonl.zst for a "
    "part of a capture"
)


@verb(epilog=X_RULE)
@click.argument("captures", nargs=-1, required=True, type=PLACE, metavar="CAPTURE[#REQUEST[@STEP[:LAST]]]...")
@flag("-o,--output DIR|FILE", "A folder for tables, a page or a capture.", required=True)
@flag(
    "--findings",
    "The judge whose findings a page shows. With diagnose, the models are loaded.",
    click.Choice(["verify", "diagnose", "none"]),
    default="verify",
)
@no_clobber_option
@privacy_options
@source_options
def export(captures: tuple[str, ...], output: str, findings: str, *, no_clobber: bool, **flags: Any) -> None:  # noqa: ANN401
    """Write captures as one HTML page, as Parquet tables, or a part of a capture as a capture.

    \b
      specscope export run.jsonl -o run.html                 a page that any browser opens, offline
      specscope export run.jsonl#r3 -o part.html             of one request
      specscope export before.jsonl after.jsonl -o x.html    of two captures, compared
      specscope export run.jsonl -o tables                   tables for pandas, DuckDB and other tools
      specscope export run.jsonl#r3 -o part.jsonl            a request, to attach to an issue
      specscope export run.jsonl#r3@17 -o part.jsonl         a step of it
      specscope export run.jsonl#r3@10:40 -o part.jsonl      its steps 10 to 40, both included; 10: is to its end
      specscope export run.jsonl#r3@10:40 run.jsonl#r5 -o part.jsonl.gz --no-text

    A page holds the whole run: every step, tree and decision, and links to each. It needs no network and no server.

    A folder gets the tables runs, requests, steps (one row for each request and step), nodes (one for each drafted
    token), finals (the token that ended each decode step), tokens (texts) and intervals (of captures that hold counts
    only). The folder must be new or empty, or hold an older export, which is replaced. Needs pip install
    'specscope[export]'.

    A part holds the prompt, parameters and output of its requests; of other requests, only how many took part in a
    step. --no-text leaves out texts, --no-tokens token ids too. Every verb that reads a capture reads a part.
    """
    existing = Existing.REFUSE if no_clobber else Existing.REPLACE
    folder = os.path.isdir(output) or not Path(output).suffix
    is_page, is_part = (output.lower().endswith(ends) and not folder for ends in (PAGES, PART))
    if not (folder or is_page or is_part):
        raise UserError(f"-o {output}: {FORMS}")
    if findings != "verify" and not is_page:
        raise UserError(f"--findings is for a page, and {output} is none: write -o run.html")
    named, privacy = [split_file(capture) for capture in captures], asked_privacy(flags)
    if is_page:
        _write_page(named, output, privacy, existing, findings)
    else:
        (_write_part if is_part else _write_tables)(named, output, privacy, existing)


def _write_page(
    named: Sequence[tuple[str, str]], output: str, privacy: Privacy, existing: Existing, findings: str
) -> None:
    from specscope.page.write import write_page

    files = as_runs(list(dict.fromkeys(file for file, _ in named)))
    if len(files) > 2:
        raise UserError(f"{output} takes one capture, or two that are compared: {len(files)} were given")
    if len(files) == 2 and (place := next((place for _, place in named if place), "")):
        raise UserError(f"#{printable(place)} names a part: a page takes parts of one capture, or two whole captures")
    check_output(output, "-o", files, PAGE, existing)
    with reading_bar("reading") as progress:
        runs = [_run(file, [place for _, place in named if place], privacy, progress) for file in files]
    for run in runs if len(runs) == 2 else ():
        need_steps(run.history, run.source, "compared on a page")
    if findings == "diagnose":
        from specscope.cli.diagnose import said_of

        runs = [replace(run, diagnosed=said_of(run.history, run.source, run.warnings)) for run in runs]
    size = write_page(output, runs, findings)
    say(f"wrote {output}: {plural(sum(len(run.history.steps) for run in runs), 'step')}, {plural(size, 'byte')}")


def _run(file: str, places: Sequence[str], privacy: Privacy, progress: Callable[[float], None] | None) -> PageRun:
    """A capture, or these places of it, without what is left out."""
    from specscope.page.run import kept
    from specscope.page.write import PageRun

    reader = read_capture(file, progress)
    history, warnings = reader.history, [*reader.warnings]
    if places:
        need_steps(history, file, "exported in part")
        part = part_of(history, places, privacy)
        warnings.append(f"a part: {', '.join(part.requests)}; left out: {', '.join(part.left_out)}")
        history = kept(history, part.records, privacy)
        history.in_part = True
    elif privacy:
        history = kept(history, history.steps, privacy)
    warn(*warnings)
    return PageRun(file, history, warnings)


def _write_tables(named: Sequence[tuple[str, str]], folder: str, privacy: Privacy, existing: Existing) -> None:
    from specscope.analyze.export.exporting import export as write

    if place := next((place for _, place in named if place), ""):
        raise UserError(f"#{printable(place)} names a part of a capture, which needs a file: -o part.jsonl")
    if existing is Existing.REFUSE and os.path.isdir(folder) and any(Path(folder).iterdir()):
        raise UserError(f"{folder} is not empty (--no-clobber): give another folder")
    captures = [file for file, _ in named]
    need_different(captures)
    with reading_bar("exporting") as progress:
        written = write(as_runs(captures), folder, progress, privacy)
    warn(*written.warnings)
    counts = (plural(count, name.removesuffix("s")) for name, count in written.rows.items() if count)
    say(f"wrote {folder}: {', '.join(counts)}")


def _write_part(named: Sequence[tuple[str, str]], output: str, privacy: Privacy, existing: Existing) -> None:
    inputs = list(dict.fromkeys(file for file, _ in named))
    file, *others = as_runs(inputs)
    if others:
        raise UserError(f"{others[0]} and {file} are different captures: {output} takes parts of one capture")
    check_output(output, "-o", inputs, CAPTURE, existing)
    history = read_shown(file, "exported in part").history
    first = next(iter(history.requests), "r3")
    is_part = isinstance(file, CaptureSource) and len(history.requests) == 1  # a store's trace of a request
    if not is_part and not all(place for _, place in named):
        raise UserError(f"{output} takes a part of {file}: name a request after #, such as {file}#{printable(first)}")
    part = part_of(history, [place or first for _, place in named], privacy)
    size = write_part(part, history.vocabulary, output)
    counts = f"{plural(part.steps, 'step')} of {plural(len(part.requests), 'request')}, {plural(size, 'byte')}"
    say(f"wrote {output}: {counts}; left out: {', '.join(part.left_out)}")
