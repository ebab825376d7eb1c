"""`specscope run`, `capture` and `debug`: our engine over prompts, on a screen, without one, or in a console."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console

from specscope.analyze.why import Typical
from specscope.cli import options
from specscope.cli.captures import read_shown, source_options, tell_failed, terminal_bar
from specscope.cli.help import verb
from specscope.cli.options import DEBUGGED, PROMPT, X_RULE, What, flag
from specscope.cli.streams import need_terminal, say, show, warn
from specscope.debug.answers import Notice
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.debug.viewer import Viewer
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec, TooLargeError
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, interruptible
from specscope.lifetime import Lifetime
from specscope.remote.debug_socket import AttachedCommands
from specscope.terminal import text_console
from specscope.trace.files import read_lines
from specscope.trace.history.loops import TOLD, loop_share
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import Undrafted, count_undrafted, undrafted_text
from specscope.trace.history.wording import failures, plural
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestEnd, StepRecord
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.reading import split_reference

if TYPE_CHECKING:
    from specscope.live.server import Ready

SIGN = "(specscope) "
LARGEST_SCRIPT = 2**20  # bytes
LONGEST_LINE = 10_000  # characters


@verb()
@click.argument("prompts", nargs=-1, type=PROMPT)
@options.file_option
@flag("-o,--output FILE", "Also capture the run to this file.")
@options.no_clobber_option
@flag("--paused", "Start paused before the first step.")
@options.engine_options
@options.sampling_options
@options.output_options
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
    config: EngineConfig
    specs: list[PromptSpec]
    params: SamplingParams
    how: Mapping[str, Any]  # how prompts become text
    outputs: OutputOptions

    @classmethod
    def of(cls, flags: Any, prompts: Sequence[str], output: str | None, file: str | None, **more: Any) -> Self:  # noqa: ANN401
        """Take the flags of a run out of `flags`. `more`: of `read_specs`. Raises UserError."""
        config = options.engine_config(flags)
        params, how = options.sampling_params(flags)
        outputs = options.output_settings(flags, output, (*prompts, file, config.target, config.draft_model))
        specs = options.read_specs(prompts, file, params, how, outputs.privacy, **more)
        return cls(config, specs, params, how, outputs)


def _on_screen(asked: AskedRun, lifetime: Lifetime, *, paused: bool) -> int:
    """Show the screen at once, while a worker process loads; the exit code is 1 where a request failed or the capture
    lacks something.

    However it ends, running requests end as cancelled and the capture is complete. Raises UserError.
    """
    outputs: list[Outputs] = []
    losses: list[str] = []

    def open_outputs(ready: Ready) -> None:
        tell = lambda line: worker.news.append(Notice(line))  # noqa: E731
        outputs.append(Outputs(asked.outputs, worker.bus, ready.run, ready.vocabulary, asked.params, tell=tell))

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
    warn(*losses)
    worker.poll(viewer.history)  # what came after the screen had closed
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
@options.no_clobber_option
@flag("--quiet", "Print no progress bar and no summary.")
@options.engine_options
@options.sampling_options
@options.output_options
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
    total, undrafted, ends = Acceptance(), Counter[Undrafted](), list[RequestEnd]()
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
        outputs = Outputs(asked.outputs, *to, asked.params, tell=warn)
        lifetime.leave = outputs.close  # where a step takes longer than the grace
        with interruptible() as interrupt:  # the sinks' end too: a signal must not cut it short
            try:
                while engine.busy:
                    if interrupt.asked:
                        engine.cancel_all()
                    record = engine.step()
                    undrafted.update(count_undrafted(engine.run_info, [record]))
                    ends += record.finished
                    _count(record, total, update)
            finally:
                losses = outputs.close()
    warn(*losses, *(errors := failures(ends)))
    what = "interrupted; captured" if interrupt.asked else "captured"
    line = f"{what} {summary(total, undrafted, loop_share([end.output for end in ends]))}"
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


@verb(epilog=X_RULE)
@click.argument("given", nargs=-1, metavar="X...", type=DEBUGGED)
@options.file_option
@flag("--commands,script FILE", "Run the commands in FILE, then exit. Standard input is -.")
@options.engine_options
@options.sampling_options
@source_options
def debug(given: tuple[str, ...], file: str | None, script: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Debug prompts on a live engine, a capture, or a running engine.

    \b
      specscope debug "Why is the sky blue?"
      specscope debug run.jsonl#r3@17           a capture, from that step on
      specscope debug debug.sock                the socket of specscope serve --debug-socket or vllm --debug

    Set breakpoints, step forward and back, try other outcomes. The run starts paused before step 0. Try
    `break reject if p > 0.2`, then `continue`; `help` lists all commands. A script (--commands) runs to its end; the
    exit code is 2 if a command failed.
    """
    config = options.engine_config(flags)
    params, how = options.sampling_params(flags)
    whole = next((x for x in given if What.of(x) in (What.SOCKET, What.RECORDING)), None)
    if whole is not None:
        is_socket = What.of(whole) is What.SOCKET
        if len(given) > 1 or file is not None:
            raise UserError(f"{whole} is {'a socket' if is_socket else 'a capture'}, so debug takes no prompts with it")
        others = {"given", "script", "headers", "run"}
        options.refuse_others(whole, "is a running engine" if is_socket else "is a capture", others)
    lines = () if script is None else read_script(script)
    if whole is not None and is_socket:
        with closing(AttachedCommands(whole)) as attached:  # when it ends, the engine runs on
            show(attached.greeting)
            converse(attached, script or "", lines)
        return
    if whole is not None:
        converse(over_capture(whole), script or "", lines)
        return
    specs = options.read_specs(given, file, params, how)
    if not specs:
        raise UserError("nothing to debug: give a prompt, --file FILE, a capture or a socket")
    from specscope.live.start import check_places

    check_places(config)
    from specscope.live.local import live_commands

    commands = live_commands(config, specs)
    converse(commands, script or "", lines)
    if script is not None:
        sys.exit(int(tell_failed(commands.session.history)))


def read_script(path: str) -> list[str]:
    """Read all of it before the first command runs and before a model is loaded. Raises UserError."""
    lines = [line for _, line in read_lines(path, "the commands in", largest=LARGEST_SCRIPT)]
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            raise UserError(f"{path}, line {number}: the line is too long")
    return lines


def converse(commands: Commands, script: str = "", lines: Sequence[str] = ()) -> None:
    """Run the lines of a script, or typed ones until they end. A refused one is reported at once.

    Raises UserError that counts those of a script and names the first.
    """
    commands.session.typical = Typical(lambda: commands.session.history)
    refused: list[int] = []
    for number, line in enumerate(lines if script else _typed(commands), 1):
        if script:
            show(f"{SIGN}{line}")
        try:
            if line.strip() or not script:
                _obey(commands, line)
        except UserError as error:
            say(f"{script}, line {number}: {error}") if script else show(str(error), error=True)
            refused.append(number)
        if commands.quitting:
            break
    if script and refused:
        where = f"in line {refused[0]}" if len(refused) == 1 else f"the first in line {refused[0]}"
        raise UserError(f"{script}: {plural(len(refused), 'command')} failed, {where}")


def _obey(commands: Commands, line: str) -> None:
    """Run one line and print the answer. Ctrl-C stops a run between two steps."""
    with interruptible() as interrupt:
        commands.session.interrupted = commands.what_if.interrupted = lambda: interrupt.asked
        text = commands.run(line)
    if interrupt.asked and interrupt.number is not signal.SIGINT:
        sys.exit(interrupt.code)
    if text:
        show(text)


def _typed(commands: Commands) -> Iterator[str]:
    """Typed lines, with history and completion where there is a terminal; Ctrl-C drops a line, Ctrl-D ends."""
    if sys.stdin.isatty():
        _readline(commands)
    while True:
        try:
            yield input(SIGN)
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()


def _readline(commands: Commands) -> None:
    import readline

    def complete(text: str, state: int) -> str | None:
        matches = commands.complete(readline.get_line_buffer())
        return matches[state] if state < len(matches) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


def over_capture(reference: str) -> Commands:
    """The debugger over a recording, FILE, or at a step of one, FILE#REQUEST@STEP. Raises UserError."""
    path, start = split_reference(reference)
    commands = Commands(Session(history=read_shown(path, "debugged").history))
    if start:
        show(commands.run(f"goto {start}"))
    return commands
