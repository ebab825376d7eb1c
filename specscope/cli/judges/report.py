"""`specscope report`, `open` and `why`: a run's figures, the screen over it, and why a token was rejected."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from specscope.analyze.compare.counts import gate
from specscope.analyze.plain import plain
from specscope.analyze.report import build_report, several
from specscope.analyze.text import TOP, render_several, render_text
from specscope.analyze.why import NodeAnswer, RunAnswer, why_part, why_run
from specscope.cli.arguments import FIGURES, PLACE, X_RULE, whole_from
from specscope.cli.captures import need_different, need_steps, print_json, read_branch, source_options, watched
from specscope.cli.help import verb
from specscope.cli.options import branch_option, flag, json_option
from specscope.cli.streams import need_terminal, say, warn
from specscope.debug.viewer import Viewer
from specscope.envelope import envelope, of_capture, of_captures
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.record.vocabulary import shell_word
from specscope.trace.stored import as_runs, every_run
from specscope.trace.wire.reading import CaptureReader, split_file, split_reference


@verb(epilog=X_RULE)
@click.argument("captures", nargs=-1, required=True, type=FIGURES, metavar="CAPTURE...")
@json_option
@branch_option
@flag("--top N", "N rejected tokens.  [default: 10]", whole_from(1, 2**31))
@flag("--fail-if CONDITION", 'Exit with 1 if this holds, e.g. "tau < 1.5".  [figures: compare --help-all]')
@source_options
def report(captures: tuple[str, ...], as_json: bool, branch: int | None, top: int | None, fail_if: str | None) -> None:
    """Print the acceptance figures of a run.

    \b
      specscope report run.jsonl
      specscope report run*.jsonl                                               pooled, then one by one
      specscope report http://localhost:8000/metrics --fail-if "tau < 1.5"      one reading of a server

    Figures are pooled, by position and by request (worst first). Questions over many steps follow: which tokens are
    rejected most, how well the drafter's probability predicts acceptance, when drafts are accepted, and how the drafter
    ranked the target's tokens. Each row names a step: specscope open CAPTURE#REQUEST@STEP opens it. For counts (watch):
    when the level changed, and what the low intervals have in common.
    """
    captures = tuple(each for file in captures for each in watched(file))
    need_different(captures)
    reports, warnings = [], []
    for file in (run for capture in as_runs(captures) for run in every_run(capture)):
        reader = read_branch(file, branch)
        reports.append(build_report(reader.history, source=file, warnings=reader.warnings))
        warnings += reader.warnings
    figures, conditions = several(reports), gate(captures, fail_if) if fail_if else ()
    code = int(any(condition.hit for condition in conditions))
    if as_json:
        each = [of_capture(one.source, one.to_dict(), warnings=one.warnings) for one in figures.reports]
        met = {"conditions": [asdict(condition) for condition in conditions]} if conditions else {}
        print_json(of_captures("report", each, code, figures.to_dict() | met, figures.notes))
        for warning in warnings:
            warn(warning)
    elif len(reports) == 1:
        render_text(reports[0], text_console(), top or TOP)
    else:
        render_several(figures, text_console(), top or TOP)
    for condition in conditions:
        say(f"--fail-if {condition.text}: {condition.detail}")
    sys.exit(code)


@verb("open", epilog=X_RULE)
@click.argument("file", metavar="X", type=PLACE)
@source_options
@click.pass_obj
def open_recording(lifetime: Lifetime, file: str) -> None:
    """Show a capture on the same screen as a live run.

    \b
      specscope open run.jsonl
      specscope open run.jsonl#r3@17
      specscope open http://localhost:16686/trace/4f836fc2338be204b3bf1b5f58777b77

    X is a file, or the address of a request's trace in Jaeger or Tempo, copied from the browser. The screen has a time
    slider. X#REQUEST@STEP opens at that step of that request; on the screen, y copies this reference.
    """
    with ends_at_once():
        from specscope.tui.app import run_app

        file, start = split_reference(file)
        reader = CaptureReader(file)
        need_terminal(f"specscope report {shell_word(file)}")
        reader.read(0.1)
    run_app(Viewer.over(reader), lifetime, title=Path(file).name, reference=file, start=start)
    for warning in reader.warnings:
        warn(warning)


@verb(epilog=X_RULE)
@click.argument("place", type=PLACE, metavar="CAPTURE[#REQUEST[@STEP[/NODE]]]")
@json_option
@branch_option
@source_options
def why(place: str, *, as_json: bool, branch: int | None) -> None:
    """Explain why a token was rejected.

    \b
      specscope why run.jsonl            the kinds of rejection that cost this run most
      specscope why run.jsonl#r3         the same for one request
      specscope why run.jsonl#r3@17      a step: its path and the node that ended it
      specscope why run.jsonl#r3@17/4    a node: what the target wanted, what decided, what would have accepted it
    """
    file, text = split_file(place)
    reader = read_branch(file, branch)
    history = reader.history
    need_steps(history, file, "explained")
    answer: NodeAnswer | RunAnswer
    if not text:
        answer = why_run(history)
    else:
        request, named = history.find(text)
        step = named.index
        answer = why_run(history, request.id) if step is None else why_part(history, request, step, named.node)
    if as_json:
        print_json(envelope("why", plain(answer), source=[file], warnings=reader.warnings))
    else:
        for warning in reader.warnings:
            warn(warning)
        render(answer, file, text_console())


def render(answer: NodeAnswer | RunAnswer, file: str, console: Console) -> None:
    """Print a sentence per line; for a run, a paragraph per kind."""
    if isinstance(answer, NodeAnswer):
        console.print(Text(str(answer.reference), style="bold cyan"))
        for number, sentence in enumerate((*answer.sentences, *answer.typical)):
            console.print(Text(sentence, style="bold" if number == 0 else ""))
        return
    for line in answer.lines():
        console.print(Text(line))
    if answer.kinds:
        example = answer.kinds[0].examples[0]
        console.print(Text(f"\nExample: specscope why {shell_word(f'{file}#{example}')}", style="dim"))
        console.print(Text(f"A fault, or a weak drafter: specscope diagnose {shell_word(file)}", style="dim"))
