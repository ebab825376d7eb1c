"""What the commands that judge a capture have in common: reading it, a console for their text, and their pages."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specscope.analyze.findings import Exit
from specscope.cli.options import RECORDED, apply, flag
from specscope.cli.streams import say, show, warn
from specscope.envelope import envelope, of_capture, of_captures
from specscope.errors import UserError
from specscope.terminal import text_console
from specscope.trace.history.history import History
from specscope.trace.history.wording import failures
from specscope.trace.kinds import ReadAs, kind_of, start_of
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import Vocabulary, printable
from specscope.trace.stored import CaptureSource, StoreAddress, as_runs, every_run
from specscope.trace.wire.outputs import Bus, OutputOptions, Outputs
from specscope.trace.wire.reading import CaptureReader, read_capture, split_file
from specscope.trace.wire.spans import SpanLevel

EVERY = 10.0  # seconds between lines of progress

captures_argument = click.argument("captures", nargs=-1, required=True, type=RECORDED, metavar="CAPTURE...")


def read_branch(file: str, branch: int | None, what: str = "") -> CaptureReader:
    """A whole capture, its history at the end of a branch; None: of the last. `what` it is to be, if that needs steps.

    Raises UserError.
    """
    reader = read_capture(file)
    if what:
        need_steps(reader.history, file, what)
    gc.freeze()  # what was read stays until the command ends: no later search for cycles looks at it
    if branch is not None:
        if branch not in reader.history.branches:
            known = ", ".join(map(str, reader.history.branches))
            raise UserError(f"--branch {branch}: the run has no such branch; there are: {known}")
        reader.history.show(branch)
    return reader


def read_shown(file: str, what: str) -> CaptureReader:
    """A whole capture that has steps, read with a bar, its warnings shown. `what` it is to be. Raises UserError."""
    with reading_bar("reading") as progress:
        reader = read_capture(file, progress)
    need_steps(reader.history, file, what)
    warn(*reader.warnings)
    return reader


def need_steps(history: History, file: str, what: str) -> None:
    """Refuse a capture that holds only sums, over intervals or of requests, and no steps. Raises UserError."""
    if history.figures_only:
        raise UserError(
            f"{file} cannot be {what}: it holds figures per request and no steps (level `requests` or `steps`, or "
            "each request ended before its first step); use open, report or compare"
        )
    if history.counts_only:
        sources = {step.aggregate.source for step in history.steps if step.aggregate is not None}
        raise UserError(
            f"{file} cannot be {what}: the capture holds counts only ({', '.join(sorted(sources))} reports no trees); "
            "use open, report or compare"
        )


def tell_failed(history: History) -> bool:
    """Say how many requests of a run failed, and why; whether any did."""
    lines = failures(request.end for request in history.requests.values())
    warn(*lines)
    return bool(lines)


@contextmanager
def reading_bar(what: str) -> Iterator[Callable[[float], None] | None]:
    """What updates a progress bar of the reading with a share from 0 to 1; None where no terminal shows it."""
    if not sys.stderr.isatty():
        yield None
        return
    with progress_bar() as tell:
        yield lambda share: tell(f"{what}, %", int(100 * share), 100)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """What updates a bar with what is done and of how much."""
    with terminal_bar(text_console(error=True), "loading", None) as update:
        yield lambda what, done, total: update(description=what, completed=done, total=total)


@contextmanager
def terminal_bar(console: Console, what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on the terminal, and what changes it.

    Where no terminal is, a line now and then, from a thread: a model that loads or a search reports nothing for long.
    """
    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    text, is_drawn = TextColumn("{task.description}", markup=False), sys.stderr.isatty()
    bar = Progress(*columns, text, console=console, transient=True, refresh_per_second=4, disable=not is_drawn)
    ended, began = threading.Event(), time.monotonic()

    def lines() -> None:
        while not ended.wait(EVERY):
            task = bar.tasks[0]
            count = f", {task.completed:,} of {task.total:,}" if (task.total or 0) > 1 else ""
            click.echo(f"{time.monotonic() - began:.0f} s: {task.description}{count}", err=True)

    with bar:
        update = functools.partial(bar.update, bar.add_task(what, total=total))
        if not is_drawn and not console.quiet:
            threading.Thread(target=lines, daemon=True).start()
        try:
            yield update
        finally:
            ended.set()


def print_json(value: Mapping[str, Any]) -> None:
    """Print an envelope on standard output: as bytes, because a locale may not have all characters."""
    try:
        data = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a file whose name is not UTF-8
        data = json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace")
    # What could move the cursor or turn the text's direction is escaped; it reads the same
    text = re.sub(r"[^\n -~]", lambda it: it[0] if it[0].isprintable() else json.dumps(it[0])[1:-1], data.decode())
    click.echo(text.encode() if hasattr(sys.stdout, "buffer") else text)


def answer_json(
    verb: str, values: Mapping[str, Any], source: Sequence[str], warnings: Sequence[str] = (), code: int = 0
) -> None:
    """Print an answer as an envelope, and its warnings on standard error too."""
    print_json(envelope(verb, values, source=source, code=code, warnings=warnings))
    warn(*warnings)


NAMED = ("captures", "others", "file", "place", "given")  # arguments that are captures
_LOGIN = "Extra HTTP header for the trace store (for a login); repeatable."
_SOURCE = (
    flag("--header,headers 'NAME: VALUE'", _LOGIN, multiple=True, usual=False),
    flag("--run ID", "Which run to read if CAPTURE holds several.", usual=False),
)
source_options = functools.partial(apply, _SOURCE)  # of a verb that reads captures


def read_sources(params: dict[str, Any]) -> None:
    """Put what was fetched in place of addresses, and the run that was asked for in place of all. Raises UserError."""
    headers, run = params.pop("headers"), params.pop("run")
    login, known = _header_lines(headers), dict[StoreAddress, CaptureSource]()

    def read(value: Any) -> Any:  # noqa: ANN401 - a capture, or several
        if value is None or isinstance(value, tuple):
            return value and tuple(map(read, value))
        if isinstance(value, StoreAddress):
            known[value] = known.get(value) or _fetched(value, login)
            value = known[value].but(place=value.place)
        return value if run is None or (type(value) is str and StoreAddress.is_one(value)) else _of_run(value, run)

    params |= {name: read(params[name]) for name in NAMED if name in params}
    if headers and not known:
        raise UserError("--header goes to a trace store: give an address, http://HOST:16686/trace/ID")


def _of_run(capture: str, run: str) -> CaptureSource:
    file, place = split_file(capture)
    source = CaptureSource.of(file)
    ids = {each.run for each in map(CaptureSource.of, every_run(source)) if each.run.startswith(run)}
    return source.but(run=ids.pop() if len(ids) == 1 else run, place=place)


def watched(file: str, since: str = "") -> tuple[str, ...]:
    """The captures of a file that watch reads, one of each engine; any other as it is. Raises UserError.

    `since`: another such file. Where the counters of this one go on from there, it is told what they counted since.
    """
    place = file.files[0] if isinstance(file, CaptureSource) and file.files else Path(file)  # a pipe is a file by now
    from_server = StoreAddress.is_one(file) and not isinstance(file, CaptureSource)  # that is what a trace store told
    kind = None if StoreAddress.is_one(file) else kind_of(start_of(place))
    if not from_server and (kind is None or kind.reader is not ReadAs.WATCH):
        return (file,)
    from specscope.watch.source import File, Server, continued
    from specscope.watch.watching import Watch

    folder = Path(tempfile.mkdtemp(prefix="specscope-watch-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if from_server:
        server = Server(file, 1.0)
        server.open()  # which raises where there are no figures
        file, place = server.url, folder / server.name
        place.write_text(server.read()[0])

    def open_outputs(run: RunInfo, bus: Bus, engine: str, number: int) -> Outputs:
        path = str(folder / f"{number}.jsonl")
        asked = OutputOptions(path, None, None, SpanLevel.TREES, None, privacy=Privacy.NO_TEXT)
        return Outputs(asked, bus, run, Vocabulary(), None, engine=engine)

    before = continued(file, since) if since else []
    source = File(str(place), follow=False, since=before)
    watch = Watch([source], open_outputs)
    watch.start()
    try:
        while not watch.done:
            watch.news.clear()  # a full list would make it wait
            time.sleep(0.02)
    finally:
        losses = watch.stop()
    if watch.errors:
        raise watch.errors[0]
    if not watch.runs:
        raise UserError(f"{printable(file)} holds no interval of any engine")
    went_on = f"the counters of {printable(file)} continue those of {printable(since)}: the figures are the difference"
    notes = (*([went_on] if before else []), *filter(None, [source.note]), *watch.faults(), *losses)
    name, engines = f"{file} since {since}" if before else file, Counter(engine for _, engine, _ in watch.runs)
    sources = []
    for (_, engine, model), run in watch.runs.items():
        named = f" engine {engine}" * bool(engine) + f" model {model}" * (len(engines) < len(watch.runs))
        sources.append(CaptureSource(name + named * (len(watch.runs) > 1), Path(run.outputs.captured), notes=notes))
    return tuple(sources)


def _header_lines(lines: Sequence[str]) -> dict[str, str]:
    """Headers by name. Raises UserError, without what may be secret."""
    headers = {}
    for line in lines:
        name, sign, value = (part.strip() for part in line.partition(":"))
        if not sign or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[ -~]+", value):
            raise UserError("--header: write a name and a value in ASCII, such as 'Authorization: Bearer TOKEN'")
        headers[name] = value
    return headers


def _fetched(address: StoreAddress, headers: Mapping[str, str]) -> CaptureSource:
    """The capture at an address; where it cannot be had, whoever reads it hears why."""
    from specscope.remote.store import fetch_capture

    try:
        with reading_bar("fetching") as progress:
            return fetch_capture(address, headers, progress)
    except UserError as error:
        return CaptureSource(address, error=str(error))


def need_different(files: Sequence[str], where: str = "") -> None:
    """Refuse a file that is given twice, under whatever names. Raises UserError."""
    seen: dict[object, str] = {}
    for file in files:
        try:
            key: object = (os.stat(file).st_dev, os.stat(file).st_ino)
        except OSError:
            key = file  # reading it reports what is wrong
        if (other := seen.setdefault(key, file)) is not file or files.count(file) > 1:
            same = f"{file} is given twice" if other == file else f"{other} and {file} are the same file"
            raise UserError(f"{same}{where}: leave one out")


def judge_each(verb: str, files: Sequence[str], judge: Callable[[str], Mapping[str, Any]], *, as_json: bool) -> int:
    """Judge captures one by one; returns the exit code over all. Raises UserError where the only one cannot be read.

    `judge` returns its findings on a file (`envelope.of_capture`), and prints them as text unless `as_json`.
    """
    need_different(files)
    files = as_runs(files)
    captures: list[Mapping[str, Any]] = []
    for number, file in enumerate(files):
        if number and not as_json:
            click.echo()
        try:
            captures.append(judge(file))
        except UserError as error:
            if len(files) == 1 and not as_json:
                raise
            say(f"specscope: error: {error}" if file in str(error) else f"specscope: error: {file}: {error}")
            captures.append(of_capture(file, {"error": str(error)}, code=Exit.NOT_JUDGED))
    exits = [Exit(capture["exit"]) for capture in captures]
    if as_json:
        print_json(of_captures(verb, captures, Exit.over(exits)))
    elif len(files) > 1:
        told = list(zip(files, exits, strict=True))
        by_exit = {verdict: [file for file, code in told if code is verdict] for verdict in Exit}
        counts = (f"{len(those)} {verdict.words} ({', '.join(those)})" for verdict, those in by_exit.items() if those)
        show(f"\n{len(files)} captures: {'; '.join(counts)}")
    return int(Exit.over(exits))
