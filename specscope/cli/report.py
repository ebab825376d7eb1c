"""`specscope report`, `open`, `why` and `compare`: what a capture shows, and two of them, as text, JSON or a screen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from specscope.analyze.compare.comparison import compare as compare_sides
from specscope.analyze.compare.counts import CountsSide, compare_counts, gate
from specscope.analyze.compare.failif import parse
from specscope.analyze.compare.result import SideFacts
from specscope.analyze.compare.side import NoStepsError, read_sides
from specscope.analyze.compare.tables import conditions as conditions_table
from specscope.analyze.compare.tables import render_text as render_comparison
from specscope.analyze.plain import plain
from specscope.analyze.report import build_report, several
from specscope.analyze.tables import levels
from specscope.analyze.text import TOP, TableBlock, render_several, render_text
from specscope.analyze.why import NodeAnswer, RunAnswer, why_part, why_run
from specscope.cli import captures as reading
from specscope.cli.captures import need_different, print_json, read_branch, source_options, watched
from specscope.cli.help import Verb, verb
from specscope.cli.options import FIGURES, PLACE, RECORDED, X_RULE, branch_option, flag, json_option, whole_from
from specscope.cli.streams import need_terminal, say, warn
from specscope.debug.viewer import Viewer
from specscope.envelope import envelope, of_capture, of_captures
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.history.conditions import Threshold
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

    Figures are pooled, by position and by request (worst first). The drafted tokens that are rejected most follow; each
    row names a step: specscope open CAPTURE#REQUEST@STEP opens it. For counts (watch): when the level changed, and what
    the low intervals have in common.
    """
    captures = tuple(each for file in captures for each in watched(file))
    need_different(captures)
    reports, warnings, gated = [], [], []
    for file in (run for capture in as_runs(captures) for run in every_run(capture)):
        reader = read_branch(file, branch)
        reports.append(build_report(reader.history, source=file, warnings=reader.warnings))
        warnings += reader.warnings
        gated += [] if fail_if is None else [reader]
    figures, conditions = several(reports), () if fail_if is None else gate(gated, fail_if)
    code = int(any(condition.hit for condition in conditions))
    if as_json:
        each = [of_capture(one.source, one.to_dict(), warnings=one.warnings) for one in figures.reports]
        met = {"conditions": [asdict(condition) for condition in conditions]} if conditions else {}
        print_json(of_captures("report", each, code, figures.to_dict() | met, figures.notes))
        warn(*warnings)
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
        file, start = split_reference(file)
        reader = CaptureReader(file)
        need_terminal(f"specscope report {shell_word(file)}")
        from specscope.tui.app import run_app

        reader.read(0.1)
    run_app(Viewer.over(reader), lifetime, title=Path(file).name, reference=file, start=start)
    warn(*reader.warnings)


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
    reader = read_branch(file, branch, "explained")
    history = reader.history
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
        warn(*reader.warnings)
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


class WithCommand(Verb):
    """A command whose --with takes all words up to the next flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as if --with were before each of these words."""
        spread, after = list[str](), False
        for index, word in enumerate(args):
            if word == "--":
                return super().parse_args(ctx, [*spread, *args[index:]])
            if word.startswith("-") and word != "-":
                after = word == "--with"
                spread += [] if after and index + 1 < len(args) else [word]
            else:
                spread += ["--with", word] if after else [word]
        return super().parse_args(ctx, spread)


@click.command(cls=WithCommand, epilog=X_RULE)
@click.argument("captures", nargs=-1, type=RECORDED, metavar="A B | A... --with B...")
@flag("--with,others B...", "Captures of side B, if side A has several.", RECORDED, multiple=True)
@flag(
    "--fail-if,limits CONDITION",
    'Exit with 1 only if e.g. "tau drops > 2%". FIGURE (drops|rises|differs) > X[%], or '
    "FIGURE (<|>) X[%] for B alone. FIGURE is a row of the table of figures (tau, rate, depth N rate, tokens per step, "
    "whole paths, q above acceptance, squared error of q), a count (drafts, drafted, accepted, "
    'output tokens, requests), or a group: tau where GROUP is VALUE, such as "tau where label kind is code". Join '
    'several with "or".',
    multiple=True,
)
@json_option
@flag("--screen", "Show the pairs on a screen. And both trees where outputs part.")
@source_options
@click.pass_obj
def compare(lifetime: Lifetime, /, captures: tuple[str, ...], screen: bool, as_json: bool, **sides: Any) -> None:  # noqa: ANN401
    """Compare two captures, logs, metrics pages or results: did acceptance fall, and why.

    \b
      specscope compare before.jsonl after.jsonl
      specscope compare yesterday.log today.log
      specscope compare a1.jsonl a2.jsonl --with b1.jsonl b2.jsonl
      specscope compare main.jsonl branch.jsonl --fail-if "tau drops > 2%"

    Requests are paired by prompt and parameters. All differences are B - A; a table marks them with ! or *. Differences
    explained by the configuration are marked and not counted. Exit code: 0 if nothing else differs beyond error (or too
    little was captured to decide), 1 if something does, 2 for bad input. With --fail-if, 1 only if the whole 95 %
    interval of a change is beyond the limit.
    """
    a, b = _sides(captures, sides["others"])
    if screen and (as_json or sides["limits"]):
        raise UserError(f"--screen shows a screen: leave out {'--json' if as_json else '--fail-if'}")
    if screen:
        need_terminal(f"specscope compare {' '.join(map(shell_word, captures))}")
    asked = [limit for text in sides["limits"] for limit in parse(text)]
    try:
        with reading.reading_bar("reading") as progress:
            read = read_sides(a, b, progress)
    except NoStepsError:
        counts_code = _counts(a, b, asked, as_json=as_json, more=screen)
        if counts_code is None:
            raise
        sys.exit(counts_code)
    comparison = compare_sides(*read, asked)
    if screen:
        from specscope.tui.app import answer_app, run
        from specscope.tui.screens.compare import Compared, CompareScreen, help_lines

        compared = Compared(comparison, *read)
        first = lambda look: CompareScreen(look, compared)  # noqa: E731
        run(answer_app("specscope compare", first, help_lines, read[0].vocabulary), lifetime)
    elif as_json:
        _print_json(comparison.to_dict(), (comparison.a, comparison.b), comparison.exit_code)
    else:
        render_comparison(comparison, text_console())
    sys.exit(comparison.exit_code)


def _counts(a: list[str], b: list[str], asked: Sequence[Threshold], *, as_json: bool, more: bool) -> int | None:
    """Print the figures of captures that hold counts only: the exit code, None for other captures. Raises UserError."""
    counts = compare_counts(a, b, asked)
    if counts is None:
        return None
    if more:
        raise UserError("these captures hold counts only: their figures are compared; leave out --screen")
    code = int(any(condition.hit for condition in counts.conditions))
    if as_json:
        _print_json(counts.to_dict(), (counts.a, counts.b), code, counts.warnings)
        return code
    console = text_console()
    console.print(counts.headline, highlight=False, markup=False, soft_wrap=True)
    sources = {"A": counts.a.source, "B": counts.b.source}
    for name, lines in counts.defined():
        for line in (f"{name}  {', '.join(sources.get(name, ()))}".rstrip(), *(f"   {line}" for line in lines)):
            console.print(line, highlight=False, markup=False)
    for table in (counts.table(), *levels(counts.levels)):
        console.print(TableBlock(table))
    if counts.conditions:
        console.print(TableBlock(conditions_table(counts.conditions, counts.about_intervals)))
    warn(*counts.warnings, *counts.a.warnings, *counts.b.warnings)
    return code


def _sides(captures: tuple[str, ...], others: tuple[str, ...]) -> tuple[list[str], list[str]]:
    if len(captures) == 2 and not others:  # two sides, each of which may be several engines
        captures, others = watched(captures[0]), watched(captures[1], since=captures[0])
    else:
        captures, others = (tuple(each for file in side for each in watched(file)) for side in (captures, others))
    if len(captures) == 1 and not others:  # a file of two runs
        captures = tuple(every_run(captures[0]))
    a, b = list(captures), list(others)
    if not b and len(a) == 2:
        a, b = a[:1], a[1:]
    if not (a and b):
        one = f"; one file over time: specscope report {shell_word(a[0])}" if len(a) == 1 else ""
        both = "give two captures, or several on each side: specscope compare A B, or A1 A2 --with B1 B2"
        raise UserError(both + one)
    for name, side in (("A", a), ("B", b)):
        need_different(side, f" for side {name}")
    first, second = ([run for capture in as_runs(side) for run in every_run(capture)] for side in (a, b))
    return first, second


def _print_json(
    values: dict[str, Any], sides: Sequence[SideFacts | CountsSide], code: int, remarks: Sequence[str] = ()
) -> None:
    source = [file for side in sides for file in side.source]
    warnings = [*remarks]
    warnings += [f"{name}: {line}" for name, side in zip("AB", sides, strict=True) for line in side.warnings]
    reading.answer_json("compare", values, source, warnings, code)
