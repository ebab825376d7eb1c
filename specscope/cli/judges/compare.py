"""`specscope compare`: two captures, or several on a side, as text, JSON, a page or a screen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from specscope.analyze.compare.comparison import compare as compare_sides
from specscope.analyze.compare.counts import CountsSide, compare_counts
from specscope.analyze.compare.failif import parse
from specscope.analyze.compare.result import SideFacts
from specscope.analyze.compare.side import NoStepsError, read_sides
from specscope.analyze.compare.tables import conditions, render_text
from specscope.analyze.tables import levels
from specscope.analyze.text import table_block
from specscope.cli.arguments import CAPTURE, X_RULE
from specscope.cli.captures import answer_json, need_different, reading_bar, source_options, watched
from specscope.cli.help import Verb
from specscope.cli.options import flag, json_option
from specscope.cli.streams import need_terminal, warn
from specscope.errors import UserError
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.history.conditions import Threshold
from specscope.trace.record.vocabulary import shell_word
from specscope.trace.stored import as_runs, every_run


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
@click.argument("captures", nargs=-1, type=CAPTURE, metavar="A B | A... --with B...")
@flag("--with,others B...", "Captures of side B, if side A has several.", CAPTURE, multiple=True)
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
    if screen and as_json:
        raise UserError("--screen shows a screen: leave out --json")
    if screen:
        need_terminal(f"specscope compare {' '.join(map(shell_word, captures))}")
    asked = [limit for text in sides["limits"] for limit in parse(text)]
    try:
        with reading_bar("reading") as progress:
            read = read_sides(a, b, progress)
    except NoStepsError:
        counts_code = _counts(a, b, asked, as_json=as_json, more=screen)
        if counts_code is None:
            raise
        sys.exit(counts_code)
    comparison = compare_sides(*read, asked)
    if screen:
        from specscope.tui.app import run_answer
        from specscope.tui.screens.compare import Compared, CompareScreen, help_lines

        compared = Compared(comparison, *read)
        first = lambda look: CompareScreen(look, compared)  # noqa: E731
        run_answer(lifetime, "specscope compare", first, help_lines, read[0].vocabulary)
        return
    if as_json:
        _print_json(comparison.to_dict(), (comparison.a, comparison.b), comparison.exit_code)
    else:
        render_text(comparison, text_console())
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
        console.print(table_block(table))
    if counts.conditions:
        console.print(table_block(conditions(counts.conditions, counts.about_intervals)))
    for warning in (*counts.warnings, *counts.a.warnings, *counts.b.warnings):
        warn(warning)
    return code


def _sides(captures: tuple[str, ...], others: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The files of both sides. Raises UserError."""
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
    answer_json("compare", values, source, warnings, code)
