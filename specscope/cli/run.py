"""`specscope run` and `specscope capture`: prompts decoded by our engine, on a live screen or without one."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console

from specscope.cli.arguments import PROMPT, What
from specscope.cli.captures import tell_failed, terminal_bar
from specscope.cli.help import verb
from specscope.cli.options import (
    engine_config,
    engine_options,
    file_option,
    flag,
    no_clobber_option,
    output_options,
    output_settings,
    read_specs,
    sampling_options,
    sampling_params,
)
from specscope.cli.streams import need_terminal, say, warn
from specscope.debug.answers import Notice
from specscope.debug.viewer import Viewer
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec, TooLargeError
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, interruptible
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.history.loops import TOLD, loop_share
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import Undrafted, count_undrafted, undrafted_text
from specscope.trace.history.wording import failures, plural
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestEnd, StepRecord
from specscope.trace.record.tree import Ints
from specscope.trace.wire.outputs import OutputOptions, Outputs

if TYPE_CHECKING:
    from specscope.live.server import Ready


@verb()
@click.argument("prompts", nargs=-1, type=PROMPT)
@file_option
@flag("-o,--output FILE", "Also capture the run to this file.")
@no_clobber_option
@flag("--paused", "Start paused before the first step.")
@engine_options
@sampling_options
@output_options
@click.pass_obj
def run(lifetime: Lifetime, /, prompts: tuple[str, ...], file: str | None, output: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Decode prompts on a live screen: every draft tree and verdict.

    \b
      specscope run "Why is the sky blue?"

    Without PROMPTS or --file, press i on the screen to enter one.
    """
    from specscope.live.start import check_places

    paused = flags.pop("paused")
    asked = AskedRun.of(flags, prompts, output, file)
    check_places(asked.config)
    need_terminal("specscope capture PROMPTS -o FILE")
    sys.exit(_on_screen(asked, lifetime, paused=paused))


@dataclass(frozen=True)
class AskedRun:
    """What a command line asks to be run."""

    config: EngineConfig
    specs: list[PromptSpec]
    params: SamplingParams
    how: Mapping[str, Any]  # how prompts become text
    options: OutputOptions

    @classmethod
    def of(cls, flags: Any, prompts: Sequence[str], output: str | None, file: str | None, **more: Any) -> Self:  # noqa: ANN401
        """Take the flags of a run out of `flags`. `more`: of `read_specs`. Raises UserError."""
        config = engine_config(flags)
        params, how = sampling_params(flags)
        options = output_settings(flags, output, (*prompts, file, config.target, config.draft_model))
        return cls(config, read_specs(prompts, file, params, how, options.privacy, **more), params, how, options)


def _on_screen(asked: AskedRun, lifetime: Lifetime, *, paused: bool) -> int:
    """Show the screen at once, while a worker process loads; the exit code is 1 where a request failed or the capture
    lacks something.

    However it ends, running requests end as cancelled and the capture is complete. Raises UserError.
    """
    outputs: list[Outputs] = []
    losses: list[str] = []

    def open_outputs(ready: Ready) -> None:
        outputs.append(Outputs(asked.options, worker.bus, ready.run, ready.vocabulary, asked.params, tell=notify))

    def notify(line: str) -> None:
        worker.news.append(Notice(line))

    with ends_at_once():
        from specscope.live.client import Worker
        from specscope.tui.app import run_app

        worker = Worker(asked.config, asked.specs, asked.params, asked.how, on_ready=open_outputs, paused=paused)
    viewer, ending = Viewer(control=worker), threading.Lock()

    def finish() -> None:
        # When the screen closes or the terminal is lost. Further signals must not cut it short.
        with interruptible(), ending:
            worker.close()
            for opened in outputs:
                losses[:] = opened.close()

    lifetime.leave = finish
    try:
        run_app(viewer, lifetime, title="specscope run")
    finally:
        finish()
    for line in losses:
        warn(line)
    if worker.error:
        raise UserError(worker.error)
    if (history := viewer.history).steps:
        looped = loop_share([end.output for record in history.steps for end in record.finished])
        told = summary(history.acceptance, count_undrafted(history.run, history.steps), looped)
        kept = f"captured {told} → {outputs[0].captured}"
        say(kept if outputs[0].captured else f"decoded {told}; not saved (-o run.jsonl saves a run)")
    return int(tell_failed(history) or any(opened.code for opened in outputs))


@verb()
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPTS...", type=PROMPT)
@flag("-o,--output FILE", "The capture to write (OTLP JSON Lines).", required=True)
@no_clobber_option
@flag("--quiet", "Print no progress bar and no summary.")
@engine_options
@sampling_options
@output_options
@click.pass_obj
def capture(lifetime: Lifetime, /, prompts: tuple[str, ...], output: str, **flags: Any) -> None:  # noqa: ANN401
    """Decode prompts and record every step, without a screen.

    \b
      specscope capture prompts.txt -o run.jsonl

    PROMPTS are files (- is standard input), or prompts: words with spaces, or one plain word. A file holds lines of
    text, or JSON Lines with "prompt" or chat "messages", sampling parameters by name, and any other key as a label that
    reports group by. Ctrl-C ends the run and leaves a valid capture.
    """
    quiet = flags.pop("quiet")
    are_files = What.WORDS not in map(What.of, prompts) or any(" " in text for text in prompts)
    asked = AskedRun.of(flags, prompts, output, None, words_are_files=are_files)
    sys.exit(_without_screen(asked, lifetime, quiet=quiet))


def _without_screen(asked: AskedRun, lifetime: Lifetime, *, quiet: bool) -> int:
    """Run all prompts; returns the exit code: 0; 1 where a prompt cannot run, a request failed, or the capture lacks
    something; 128 and the signal's number, 130 after Ctrl-C. Raises UserError where no prompt can run.
    """
    from specscope.live.start import start_engine, too_long

    console, specs = text_console(error=True, quiet=quiet), asked.specs
    total, undrafted, texts, ends = Acceptance(), Counter[Undrafted](), list[Ints](), list[RequestEnd]()
    with terminal_bar(console, "starting", len(specs)) as update:
        with ends_at_once():
            begin = _staged(console, update)
            long = too_long(asked.config, specs, begin)
            refused = list(long.values())
            if len(refused) == len(specs):
                raise UserError(refused[-1])
            for line in refused:
                warn(f"{line}; skipped")
            engine = start_engine(asked.config, begin)
            begin("running")
        for number, spec in ((number, spec) for number, spec in enumerate(specs) if number not in long):
            try:
                engine.add_spec(spec)
            except UserError as error:
                refused.append(f"{spec.place or f'prompt {number + 1}'}: {error}")
                if len(refused) == len(specs) or not isinstance(error, TooLargeError):
                    raise UserError(refused[-1]) from None
                warn(f"{refused[-1]}; skipped")
        to = engine.bus, engine.run_info, engine.vocabulary
        outputs = Outputs(asked.options, *to, asked.params, tell=warn)
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
                    _count(record, total, update)
            finally:
                losses = outputs.close()
    for line in (*losses, *(errors := failures(ends))):
        warn(line)
    what = "interrupted; captured" if interrupt.asked else "captured"
    line = f"{what} {summary(total, undrafted, loop_share(texts))}"
    line += f" → {outputs.captured}" if outputs.captured else ""
    console.print(line, highlight=False, soft_wrap=True)
    if outputs.sampled:
        console.print(f"spans: {outputs.sampled}", soft_wrap=True)
    return interrupt.code if interrupt.asked else int(bool(errors or refused) or outputs.code)


def _staged(console: Console, update: Callable[..., None]) -> Callable[[str], None]:
    """What a start calls with each of its stages: on a terminal, a line for each that has ended."""
    from specscope.live.start import Stages

    stages = Stages("reading the prompts")

    def begin(stage: str) -> None:
        update(description=stage)
        if (ended := stages.begin(stage)) and sys.stderr.isatty():
            console.print(ended, style="dim", highlight=False)

    return begin


def _count(record: StepRecord, total: Acceptance, update: Callable[..., None]) -> None:
    for part in record.requests:
        total.add(part)
    tau = "–" if total.tau is None else f"{total.tau:.2f}"
    line = f"step {record.step}, {plural(total.emitted, 'token')}, acceptance length {tau}"
    update(description=line, advance=len(record.finished))


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
