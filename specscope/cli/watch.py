"""`specscope watch`: engines that report counts and no steps, on a screen, as a table, or as a capture."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from msgspec import Meta

from specscope.cli.arguments import WATCHED, X_RULE, Number, whole_from
from specscope.cli.help import verb
from specscope.cli.options import (
    asked_privacy,
    checked_endpoint,
    no_clobber_option,
    privacy_options,
    refuse_others,
    sending_options,
)
from specscope.cli.streams import need_terminal, say, warn
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, interruptible
from specscope.lifetime import Lifetime
from specscope.trace.checked import without_login
from specscope.trace.files import CAPTURE, Existing, check_output
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.vocabulary import printable, shell_word
from specscope.trace.wire.outputs import OutputOptions
from specscope.trace.wire.spans import SpanLevel

if TYPE_CHECKING:
    from rich.console import Console

    from specscope.trace.history.interval import IntervalMeans
    from specscope.trace.history.stats import Acceptance
    from specscope.trace.record.records import RunInfo, StepRecord
    from specscope.trace.wire.outputs import Bus, OutputOptions, Outputs
    from specscope.watch.source import Source
    from specscope.watch.watching import EngineRun, OpenOutputs, Watch

Seconds = Annotated[float, Meta(ge=0.05, le=1e7, description="between 0.05 and 10,000,000")]
COUNTS = {"drafts": "drafts", "drafted": "drafted tokens", "accepted": "accepted tokens", "emitted": "output tokens"}
POLL = 0.05  # seconds between two checks for news


@verb(epilog=X_RULE)
@click.argument("sources", nargs=-1, type=WATCHED, metavar="X...")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Receive spans at this address: gRPC here, HTTP at the next port. Anyone who can reach it can send; "
    "with 0.0.0.0, every machine.",
)
@click.option("--http-port", type=whole_from(0, 65535), metavar="PORT", help="With --listen: another port for HTTP.")
@click.option(
    "--interval",
    type=Number(Seconds),
    default=5.0,
    show_default=True,
    metavar="S",
    help="Seconds between two readings of a URL.",
)
@click.option(
    "-o", "--capture", metavar="FILE", help="Record the intervals. A second engine's go to NAME-2, and so on."
)
@no_clobber_option
@sending_options
@click.option("--headless", is_flag=True, help="Print a line for each interval instead of showing a screen.")
@click.option("--follow", is_flag=True, help="With --headless: wait for more when a log file ends.")
@privacy_options
@click.option("--for", "seconds", type=Number(Seconds), metavar="S", help="Stop after S seconds.")
@click.pass_obj
def watch(
    lifetime: Lifetime,
    /,
    sources: tuple[str, ...],
    listen: str | None,
    http_port: int | None,
    interval: float,
    capture: str | None,
    no_clobber: bool,
    headless: bool,
    follow: bool,
    seconds: float | None,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Watch running engines: by the counts they report, or with --listen by the steps they send.

    \b
      specscope watch http://localhost:8000/metrics      vLLM, SGLang or llama.cpp
      kubectl logs -f POD | specscope watch -            a log of vLLM, SGLang or llama.cpp
      specscope watch response.json                      figures per request, llm.get_metrics(), results of tools
      specscope watch --listen 127.0.0.1:4317            engines that send spans, with every tree

    Counts are shown by interval: acceptance by position and acceptance length. report and compare read such files too.
    A capture of counts (-o) works with open, report and compare; it has no trees, so verify and diagnose cannot judge
    it.
    """
    if listen is not None:
        if sources:
            raise UserError(f"--listen waits for engines that send: leave out {sources[0]}")
        refuse_others("--listen", "shows a screen of what engines send", {"listen", "http_port"})
        _show_engines(listen, http_port, lifetime)
        return
    if not sources or http_port is not None:
        raise UserError("give X: a metrics page, a log, - or --listen HOST:PORT (--http-port goes with --listen)")
    privacy = max(Privacy.NO_TEXT, asked_privacy(flags))  # counts have no text
    if follow and not headless:
        raise UserError("--follow needs --headless: a screen always follows a log")
    if sources.count("-") > 1:
        raise UserError("standard input (-) can be watched only once")
    if no_clobber and capture is None:
        raise UserError("--no-clobber applies to a capture: give -o FILE")
    existing = Existing.REFUSE if no_clobber else Existing.REPLACE
    endpoint = flags["otlp_endpoint"] and checked_endpoint(flags["otlp_endpoint"], "--otlp-endpoint")
    about: dict[str, Any] = {"privacy": privacy, "existing": existing, "service": flags["service_name"] or ""}
    options = OutputOptions(capture, endpoint, flags["otlp_protocol"], SpanLevel.TREES, None, **about)
    with ends_at_once():
        opened, open_outputs = _opened(sources, interval, options, follow or not headless, seconds)
        if not headless:
            given = " ".join(shell_word(without_login(source)) for source in sources)
            need_terminal(f"specscope watch {given} --headless")
        from specscope.watch.watching import Watch

        watching = Watch(opened, open_outputs)
    if headless:
        sys.exit(_print(watching, seconds))
    _show(watching, seconds, lifetime)


def _show_engines(address: str, http_port: int | None, lifetime: Lifetime) -> None:
    """Show engines elsewhere: listen on HOST:PORT for gRPC, and on `http_port` (None: the port after it) for HTTP."""
    from specscope.remote.attached import Attached, checked_address

    host, port = checked_address(address, "--listen")
    if http_port is None and port == 65535:
        raise UserError(f"--listen {address}: there is no next port for HTTP: give --http-port too")
    need_terminal("an OpenTelemetry Collector, which writes captures (docs/telemetry.md)")
    with ends_at_once():
        from specscope.tui.app import run_app

        attached = Attached(host, port, http_port if http_port is not None else (port + 1 if port else 0))
    from specscope.debug.viewer import Viewer

    viewer = Viewer(control=attached)
    attached.viewer = viewer
    try:
        run_app(viewer, lifetime, title=attached.where)
    finally:
        attached.close()


def _opened(
    texts: tuple[str, ...], interval: float, options: OutputOptions, follow: bool, seconds: float | None
) -> tuple[list[Source], OpenOutputs]:
    """The sources, servers read once, and what opens the outputs of an engine. Raises UserError."""
    from specscope.trace.record.vocabulary import Vocabulary
    from specscope.trace.wire.outputs import Outputs
    from specscope.watch.source import Server, open_source

    capture = options.capture
    if capture is not None:
        check_output(capture, "-o", [text for text in texts if "://" not in text], CAPTURE, options.existing)
    sources = [open_source(text, interval, follow=follow, patience=seconds or math.inf) for text in texts]
    for source in sources:
        if isinstance(source, Server):
            source.open()
            say(f"{source.name}: {source.recognised}")

    def open_outputs(run: RunInfo, bus: Bus, engine: str, number: int) -> Outputs:
        engine_options = options
        if capture is not None and number:  # the file's name was not given: it must not replace another
            engine_options = replace(options, capture=numbered(capture, number), existing=Existing.NEW_NAME)
        return Outputs(engine_options, bus, run, Vocabulary(), None, engine=engine)

    return sources, open_outputs


def numbered(path: str, number: int) -> str:
    """The capture of the engine of that number: run.jsonl, run-2.jsonl, ..."""
    file = Path(path)
    return path if not number else str(file.with_name(f"{file.stem}-{number + 1}{file.suffix}"))


def _show(watching: Watch, seconds: float | None, lifetime: Lifetime) -> None:
    """Show the intervals on a screen until the user leaves."""
    from specscope.debug.viewer import Viewer
    from specscope.tui.app import run_app
    from specscope.watch.watching import Watched

    control = Watched(watching, seconds)
    viewer = Viewer(control=control)
    control.viewer = viewer
    losses: list[str] = []

    def finish() -> None:
        with interruptible():
            losses.extend(watching.stop())

    lifetime.leave = finish
    watching.start()
    try:
        run_app(viewer, lifetime, title=", ".join(source.name for source in watching.sources))
    finally:
        finish()
    _last_words(watching, losses)
    if control.error:
        raise UserError(control.error)
    if watching.code:
        sys.exit(watching.code)


def _print(watching: Watch, seconds: float | None) -> int:
    """Print the intervals as lines until the sources end, a signal comes or the time is up; returns the exit code."""
    from specscope.terminal import text_console

    console, rows = text_console(), IntervalRows()
    until = None if seconds is None else time.monotonic() + seconds
    with interruptible() as interrupt:
        watching.start()
        try:
            while not interrupt.asked and not (watching.done and not watching.news):
                rows.take(watching, console)
                if watching.errors or (until is not None and time.monotonic() > until):
                    break
                time.sleep(POLL)
        finally:
            losses = watching.stop()
            rows.take(watching, console)
    rows.totals(console)
    _last_words(watching, losses)
    if watching.errors:
        raise watching.errors[0]
    if not rows.any:
        say("no intervals were reported")
    return interrupt.code if interrupt.asked else watching.code


def _last_words(watching: Watch, losses: list[str]) -> None:
    for line in [*watching.faults(), *losses]:
        warn(line)


class IntervalRows:
    """The lines of a growing table, and its sums: no records are kept."""

    def __init__(self) -> None:
        self.any = False
        self._sums: dict[str, Acceptance] = {}
        self._means: dict[str, IntervalMeans] = {}
        self._units: dict[str, str] = {}
        self._runs: dict[str, EngineRun] = {}
        self._last = ""

    def take(self, watching: Watch, console: Console) -> None:
        from specscope.watch.source import Left

        for news in watching.take():
            if not isinstance(news, str):
                self._row(*news, console)
            elif not isinstance(news, Left):
                say(news)

    def _row(self, run: EngineRun, record: StepRecord, console: Console) -> None:
        from rich.text import Text

        from specscope.trace.history import interval
        from specscope.trace.history.stats import Acceptance

        aggregate = record.aggregate
        assert aggregate is not None
        if run.name not in self._sums:
            for line in (interval.missing_text(aggregate), *interval.definitions(aggregate)):
                say(line)
            self._runs[run.name], self._sums[run.name], self._means[run.name] = (
                run,
                Acceptance(),
                interval.IntervalMeans(),
            )
            self._units[run.name] = "request" if aggregate.is_request else "interval"
        if not self.any or self._last != run.name:
            head = "".join(name.rjust(width + 1) for name, width in interval.COLUMNS.items())
            model = f", {run.info.target}" if run.info.target else ""
            console.print(Text(printable(f"{run.name}{model}"), style="bold cyan"), soft_wrap=True)
            console.print(Text(f"{head}  by position, of the drafts", style="bold"), soft_wrap=True)
        self.any, self._last = True, run.name
        self._sums[run.name].add(aggregate)
        self._means[run.name].add(aggregate)
        texts = interval.cells(record, aggregate)
        line = "".join(texts[name].rjust(width + 1) for name, width in interval.COLUMNS.items())
        parts = (line, interval.by_position(aggregate), *interval.notes(aggregate), printable(aggregate.request))
        console.print(Text("  ".join(part for part in parts if part)), soft_wrap=True)

    def totals(self, console: Console) -> None:
        """A table for each engine, over all of its intervals."""
        if not self.any:
            return
        from specscope.analyze.table import Table, percent, share, told
        from specscope.analyze.text import table_block
        from specscope.trace.history.interval import few_drafted, runs
        from specscope.trace.history.wording import plural

        for name, sums in self._sums.items():
            mark = {"drafts": self._means[name].mark}
            rows = [(text, mark.get(key, "") + told(sums.told(key))) for key, text in COUNTS.items()]
            rows.append(("mean acceptance length τ", self._means[name].told(sums)))
            rows.append(("draft acceptance rate", percent(self._means[name].rate(sums))))
            if few := few_drafted(*(sums.told(key) for key in ("drafts", "accepted", "emitted"))):
                rows.append(("output tokens of steps with a draft", few))
            depths = runs(sums.per_position)
            rows += [(f"accepted at depth {depth}, of the drafts", share(rate, sums.drafts)) for depth, rate in depths]
            title = f"{name}: {plural(sums.aggregates, self._units[name])}"
            console.print(table_block(Table(printable(title), ("", ""), rows)))
        for run in self._runs.values():
            if run.captured:
                say(f"captured {run.name} → {run.captured}")
