"""`specscope watch`: engines that report counts and no steps, on a screen, as a table, or as a capture."""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec import Meta
from rich.console import Console
from rich.text import Text

from specscope.analyze.table import Table, percent, share, told
from specscope.analyze.tables import SUMS
from specscope.analyze.text import TableBlock
from specscope.cli import options
from specscope.cli.help import verb
from specscope.cli.options import WATCHED, X_RULE, Number, flag
from specscope.cli.streams import need_terminal, say, warn
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, interruptible
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.checked import without_login
from specscope.trace.files import Existing
from specscope.trace.history import interval
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.wording import plural
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary, printable, shell_word
from specscope.trace.wire.outputs import Bus, OutputOptions, Outputs
from specscope.watch.source import Left, Server, open_source
from specscope.watch.watching import EngineRun, Watch, Watched

Seconds = Annotated[float, Meta(ge=0.05, le=1e7, description="between 0.05 and 10,000,000")]
POLL = 0.05  # seconds between two checks for news


@verb(epilog=X_RULE)
@click.argument("sources", nargs=-1, type=WATCHED, metavar="X...")
@flag(
    "--listen HOST:PORT",
    "Receive spans here. OTLP over gRPC at this port, over HTTP at the next. Anyone who can reach it can send; with "
    "0.0.0.0, every machine.",
)
@flag("--interval S", "Seconds between two readings of a URL.", Number(Seconds), default=5.0)
@flag("-o,--capture FILE", "Record the intervals. A second engine's go to NAME-2, and so on.")
@options.no_clobber_option
@options.sending_options
@flag("--headless", "Print a line for each interval, without a screen.")
@flag("--follow", "With --headless: wait for more when a log file ends.")
@options.privacy_options
@flag("--for,seconds S", "Stop after S seconds.", Number(Seconds))
@click.pass_obj
def watch(lifetime: Lifetime, /, sources: tuple[str, ...], listen: str | None, headless: bool, **flags: Any) -> None:  # noqa: ANN401
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
        options.refuse_others("--listen", "shows a screen of what engines send", {"listen"})
        _show_engines(listen, lifetime)
        return
    if not sources:
        raise UserError("give X: a metrics page, a log, - or --listen HOST:PORT")
    interval, capture, follow, seconds = (flags.pop(name) for name in ("interval", "capture", "follow", "seconds"))
    if follow and not headless:
        raise UserError("--follow needs --headless: a screen always follows a log")
    if sources.count("-") > 1:
        raise UserError("standard input (-) can be watched only once")
    outputs = options.output_settings(flags, capture, [source for source in sources if "://" not in source])
    outputs = replace(outputs, privacy=max(Privacy.NO_TEXT, outputs.privacy))  # counts have no text
    with ends_at_once():
        how: dict[str, Any] = {"follow": follow or not headless, "patience": seconds or math.inf}
        opened = [open_source(text, interval, **how) for text in sources]
        for source in opened:
            if isinstance(source, Server):
                source.open()
                say(f"{source.name}: {source.recognised}")
        if not headless:
            given = " ".join(shell_word(without_login(source)) for source in sources)
            need_terminal(f"specscope watch {given} --headless")
        watching = Watch(opened, partial(_outputs, outputs))
    sys.exit(_print(watching, seconds) if headless else _show(watching, seconds, lifetime))


def _outputs(asked: OutputOptions, run: RunInfo, bus: Bus, engine: str, number: int) -> Outputs:
    """The outputs of an engine. The name of a second one's capture was not given: it must not replace another file."""
    if asked.capture is not None and number:
        given = Path(asked.capture)
        other = given.with_name(f"{given.stem}-{number + 1}{given.suffix}")
        asked = replace(asked, capture=str(other), existing=Existing.NEW_NAME)
    return Outputs(asked, bus, run, Vocabulary(), None, engine=engine)


def _show_engines(address: str, lifetime: Lifetime) -> None:
    """Show engines elsewhere: listen on HOST:PORT for gRPC, and on the port after it for HTTP."""
    from specscope.remote.attached import Attached, checked_address

    host, port = checked_address(address, "--listen")
    if port == 65535:
        raise UserError(f"--listen {address}: HTTP has the next port, and there is none: give a smaller one")
    need_terminal("an OpenTelemetry Collector, which writes captures (docs/telemetry.md)")
    with ends_at_once():
        from specscope.tui.app import run_app

        attached = Attached(host, port, port + 1 if port else 0)
    with closing(attached):
        run_app(attached.on_screen(), lifetime, title=attached.where)


def _show(watching: Watch, seconds: float | None, lifetime: Lifetime) -> int:
    """Show the intervals on a screen until the user leaves; returns the exit code. Raises UserError."""
    with ends_at_once():
        from specscope.tui.app import run_app
    control, losses = Watched(watching, seconds), list[str]()

    def finish() -> None:
        with interruptible():
            losses.extend(watching.stop())

    lifetime.leave = finish
    watching.start()
    try:
        run_app(control.on_screen(), lifetime, title=", ".join(source.name for source in watching.sources))
    finally:
        finish()
    warn(*watching.faults(), *losses)
    if control.error:
        raise UserError(control.error)
    return watching.code


def _print(watching: Watch, seconds: float | None) -> int:
    """Print the intervals as lines until the sources end, a signal comes or the time is up; returns the exit code."""
    rows = IntervalRows(text_console())
    until = math.inf if seconds is None else time.monotonic() + seconds
    with interruptible() as interrupt:
        watching.start()
        try:
            while not interrupt.asked and not (watching.done and not watching.news):
                rows.take(watching)
                if watching.errors or time.monotonic() > until:
                    break
                time.sleep(POLL)
        finally:
            losses = watching.stop()
            rows.take(watching)
    rows.totals()
    warn(*watching.faults(), *losses)
    if watching.errors:
        raise watching.errors[0]
    if not rows.engines:
        say("no intervals were reported")
    return interrupt.code if interrupt.asked else watching.code


@dataclass
class EngineSums:
    run: EngineRun
    unit: str  # of what it reports
    sums: Acceptance = field(default_factory=Acceptance)
    means: interval.IntervalMeans = field(default_factory=interval.IntervalMeans)

    def table(self) -> Table:
        sums, means = self.sums, self.means
        mark = {"drafts": means.mark}
        rows = [(text, mark.get(key, "") + told(sums.told(key))) for text, key in SUMS.items()]
        rows.append(("mean acceptance length τ", means.told(sums)))
        rows.append(("draft acceptance rate", percent(means.rate(sums))))
        if few := interval.few_drafted(*(sums.told(key) for key in ("drafts", "accepted", "emitted"))):
            rows.append(("output tokens of steps with a draft", few))
        depths = interval.runs(sums.per_position)
        rows += [(f"accepted at depth {depth}, of the drafts", share(rate, sums.drafts)) for depth, rate in depths]
        return Table(printable(f"{self.run.name}: {plural(sums.aggregates, self.unit)}"), ("", ""), rows)


class IntervalRows:
    """The lines of a growing table, and its sums: no records are kept."""

    def __init__(self, console: Console) -> None:
        self.engines: dict[str, EngineSums] = {}
        self._console = console
        self._last = ""

    def take(self, watching: Watch) -> None:
        for news in watching.take():
            if not isinstance(news, str):
                self._row(*news)
            elif not isinstance(news, Left):
                say(news)

    def _row(self, run: EngineRun, record: StepRecord) -> None:
        aggregate = record.aggregate
        assert aggregate is not None
        if run.name not in self.engines:
            for line in (interval.missing_text(aggregate), *interval.definitions(aggregate)):
                say(line)
            self.engines[run.name] = EngineSums(run, "request" if aggregate.is_request else "interval")
        if self._last != run.name:
            head = "".join(f" {name:>{width}}" for name, width in interval.COLUMNS.items())
            model = f", {run.info.target}" if run.info.target else ""
            self._line(printable(f"{run.name}{model}"), "bold cyan")
            self._line(f"{head}  by position, of the drafts", "bold")
        self._last = run.name
        self.engines[run.name].sums.add(aggregate)
        self.engines[run.name].means.add(aggregate)
        texts = interval.cells(record, aggregate)
        line = "".join(f" {texts[name]:>{width}}" for name, width in interval.COLUMNS.items())
        parts = (line, interval.by_position(aggregate), *interval.notes(aggregate), printable(aggregate.request))
        self._line("  ".join(filter(None, parts)))

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def totals(self) -> None:
        """A table for each engine, over all of its intervals."""
        for engine in self.engines.values():
            self._console.print(TableBlock(engine.table()))
        for engine in self.engines.values():
            if captured := engine.run.outputs.captured:
                say(f"captured {engine.run.name} → {captured}")
