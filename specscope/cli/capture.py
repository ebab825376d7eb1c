"""`specscope capture`: an engine in this process, its sinks, and a progress bar."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specscope.cli.streams import warn
from specscope.engine.config import EngineConfig
from specscope.engine.prompt_encoder import TooLargeError
from specscope.engine.prompts import PromptSpec
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, interruptible
from specscope.lifetime import Lifetime
from specscope.live.start import Stages, start_engine, too_long
from specscope.terminal import text_console
from specscope.trace.history.history import History
from specscope.trace.history.loops import TOLD, loop_share
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import Undrafted, count_undrafted, undrafted_text
from specscope.trace.history.wording import failures, plural
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestEnd, StepRecord
from specscope.trace.record.tree import Ints
from specscope.trace.wire.outputs import OutputOptions, Outputs


def capture_run(
    config: EngineConfig,
    specs: list[PromptSpec],
    params: SamplingParams,
    options: OutputOptions,
    lifetime: Lifetime,
    *,
    log_stats: bool,
    quiet: bool,
) -> int:
    """Run all prompts; returns the exit code: 0; 1 where a prompt cannot run, a request failed, or the capture lacks
    something; 128 and the signal's number, 130 after Ctrl-C. Raises UserError where no prompt can run.
    """
    console = text_console(error=True, quiet=quiet)
    total, undrafted, texts, ends = Acceptance(), Counter[Undrafted](), list[Ints](), list[RequestEnd]()
    with _bar(console, len(specs)) as progress:
        with ends_at_once():
            begin = _staged(console, progress)
            long = too_long(config, specs, begin)
            refused = list(long.values())
            if len(refused) == len(specs):
                raise UserError(refused[-1])
            for line in refused:
                warn(f"{line}; skipped")
            engine = start_engine(config, begin)
            begin("running")
        log = (lambda line: console.print(line, highlight=False, soft_wrap=True)) if log_stats else None
        for number, spec in ((number, spec) for number, spec in enumerate(specs) if number not in long):
            try:
                engine.add_spec(spec)
            except UserError as error:
                refused.append(f"{spec.place or f'prompt {number + 1}'}: {error}")
                if len(refused) == len(specs) or not isinstance(error, TooLargeError):
                    raise UserError(refused[-1]) from None
        for line in refused[len(long) :]:
            warn(f"{line}; skipped")
        outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, params, log, tell=warn)
        lifetime.leave = outputs.close  # where a step takes longer than the grace
        with interruptible() as interrupt:  # the sinks' end too: a signal must not cut it short
            try:
                while engine.busy:
                    if interrupt.asked:
                        engine.cancel_all()
                    record = engine.step()
                    undrafted.update(count_undrafted(engine.run_info, [record]))
                    texts += [end.output for end in record.finished]
                    ends += record.finished
                    _count(record, total, progress)
            finally:
                losses = outputs.close()
    for line in losses:
        warn(line)
    for line in (errors := failures(ends)):
        warn(line)
    what = "interrupted; captured" if interrupt.asked else "captured"
    line = f"{what} {summary(total, undrafted, loop_share(texts))}"
    line += f" → {outputs.captured}" if outputs.captured else ""
    console.print(line, highlight=False, soft_wrap=True)
    if outputs.sampled:
        console.print(f"spans: {outputs.sampled}", soft_wrap=True)
    return interrupt.code if interrupt.asked else int(bool(errors or refused) or outputs.code)


def tell_failed(history: History) -> bool:
    """Say how many requests of a run failed, and why; whether any did."""
    lines = failures(request.end for request in history.requests.values())
    for line in lines:
        warn(line)
    return bool(lines)


@contextmanager
def _bar(console: Console, requests: int) -> Iterator[Callable[[str, int], None]]:
    text = TextColumn("{task.description}", markup=False)
    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task("starting", total=requests)
        yield lambda text, done: bar.update(task, description=text, advance=done)


def _staged(console: Console, progress: Callable[[str, int], None]) -> Callable[[str], None]:
    """What a start calls with each of its stages: on a terminal, a line for each that has ended."""
    stages = Stages("reading the prompts")

    def begin(stage: str) -> None:
        progress(stage, 0)
        if (ended := stages.begin(stage)) and sys.stderr.isatty():
            console.print(ended, style="dim", highlight=False)

    return begin


def _count(record: StepRecord, total: Acceptance, progress: Callable[[str, int], None]) -> None:
    for part in record.requests:
        total.add(part)
    tau = "–" if total.tau is None else f"{total.tau:.2f}"
    progress(f"step {record.step}, {plural(total.emitted, 'token')}, acceptance length {tau}", len(record.finished))


def summary(total: Acceptance, undrafted: Counter[Undrafted], looped: float) -> str:
    """A run in a line: the acceptance length of its drafts, the tokens of all its steps, and why some had no drafts.

    `looped`: share of the output in loops, where an acceptance length says little.
    """
    counts = f"{plural(total.steps, 'decode step')}, {plural(total.emitted, 'token')}"
    if total.tokens_per_step is not None:
        counts += f" ({total.tokens_per_step:.2f} per step)"
    tau = "no drafts"
    if total.tau is not None:
        tau = f"mean acceptance length {total.tau:.2f} over {plural(total.drafts, 'draft')}"
    loops = f"{looped:.0%} of the output in loops (specscope report)" if looped >= TOLD else ""
    return "; ".join(text for text in (f"{counts}, {tau}", loops, undrafted_text(undrafted, total.steps)) if text)
