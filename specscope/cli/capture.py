"""`specscope capture`: an engine in this process, its sinks, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, interruptible
from specscope.live.start import start_engine
from specscope.trace.outputs import OutputOptions, Outputs
from specscope.trace.params import SamplingParams
from specscope.trace.records import StepRecord
from specscope.trace.stats import Acceptance
from specscope.trace.wording import plural


def capture_run(
    config: EngineConfig,
    specs: list[PromptSpec],
    params: SamplingParams,
    options: OutputOptions,
    *,
    log_stats: bool,
    quiet: bool,
) -> int:
    """Run all prompts; returns the exit code: 0, or 128 and the signal's number, 130 after Ctrl-C. Raises UserError."""
    console = Console(stderr=True, quiet=quiet)
    assert options.capture is not None
    total = Acceptance()
    with _bar(console, len(specs)) as progress:
        with ends_at_once():
            engine = start_engine(config, lambda stage: progress(stage, 0))
        log = (lambda line: console.print(line, highlight=False, soft_wrap=True)) if log_stats else None
        for number, spec in enumerate(specs, 1):
            try:
                engine.add(engine.turn(spec.prompt, raw=spec.raw), spec.params, labels=spec.labels)
            except UserError as error:
                raise UserError(f"prompt {number}: {error}") from None
        outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, params, log)
        with interruptible() as interrupt:  # the sinks' end too: a signal must not cut it short
            try:
                while engine.busy:
                    if interrupt.asked:
                        engine.cancel_all()
                    _count(engine.step(), total, progress)
            finally:
                losses = outputs.close()
    for line in losses:
        console.print(f"specscope: warning: {line}", highlight=False)
    _summary(console, options.capture, total, interrupted=interrupt.asked)
    if outputs.sampled:
        console.print(f"{'capture and spans' if options.sampling.captures else 'spans'}: {outputs.sampled}")
    return interrupt.code if interrupt.asked else 0


@contextmanager
def _bar(console: Console, requests: int) -> Iterator[Callable[[str, int], None]]:
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task("starting", total=requests)
        yield lambda text, done: bar.update(task, description=text, advance=done)


def _count(record: StepRecord, total: Acceptance, progress: Callable[[str, int], None]) -> None:
    for part in record.requests:
        total.add(part)
    tau = "–" if total.tau is None else f"{total.tau:.2f}"
    progress(f"step {record.step}, {plural(total.emitted, 'token')}, acceptance length {tau}", len(record.finished))


def _summary(console: Console, path: str, total: Acceptance, *, interrupted: bool) -> None:
    tau = "no drafts" if total.tau is None else f"mean acceptance length {total.tau:.2f}"
    what = "interrupted; captured" if interrupted else "captured"
    counts = f"{plural(total.steps, 'decode step')}, {plural(total.emitted, 'token')}"
    console.print(f"{what} {counts}, {tau} → {path}", highlight=False)
