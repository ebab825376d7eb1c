"""`specscope locate`: the first operation of a run that is wrong."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from specscope.analyze.locate.located import Stage
from specscope.cli.captures import PLACE, fetches_captures, json_option, need_steps, print_json, read_branch
from specscope.cli.judges.audit import progress_bar
from specscope.cli.numbers import whole_from
from specscope.cli.streams import need_terminal, warn
from specscope.envelope import envelope
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.record.vocabulary import shell_word

if TYPE_CHECKING:
    from specscope.analyze.locate.located import Location
    from specscope.trace.history.history import History, PlaceName


@click.command()
@click.argument("place", type=PLACE, metavar="CAPTURE[#REQUEST[@STEP[/NODE]]]")
@click.option("--target", metavar="MODEL", help="The target, if not the one that the capture names.")
@click.option("--draft-model", metavar="MODEL", help="The drafter's model, or an EAGLE head, likewise.")
@click.option(
    "--stage",
    "stages",
    multiple=True,
    type=click.Choice([stage.value for stage in Stage]),
    help="Look at this stage alone; may be given several times.  [default: all]",
)
@click.option(
    "--sample",
    type=whole_from(1, 2**31),
    metavar="N",
    help="Look for the clearest difference in N steps, evenly spread.  [default: all]",
)
@click.option("--branch", type=whole_from(0, 2**31), metavar="N", help="Look at this branch.  [default: the last]")
@click.option("--tui", "screen", is_flag=True, help="Show every operation on a screen, by position and head.")
@json_option("Print the whole walk as JSON.")
@fetches_captures
@click.pass_obj
def locate(
    lifetime: Lifetime,
    place: str,
    target: str | None,
    draft_model: str | None,
    stages: tuple[str, ...],
    sample: int | None,
    branch: int | None,
    *,
    screen: bool,
    as_json: bool,
) -> None:
    """Name the first operation of the run that is wrong.

    \b
      specscope locate run.jsonl             at the clearest difference of each stage
      specscope locate run.jsonl#r3@17       at a step
      specscope locate run.jsonl --tui

    The engine that made the capture and plain transformers compute the recorded steps again, and each operation of the
    one is compared with the same of the other, in the order of computing: embedding, every norm and projection, keys
    and values as read from the cache, scores, logits. Sampling, verdicts and draws are searched for the mistake that
    explains every node. The answer is the first operation whose inputs agree and whose output does not.

    Exit code: 1 something differs; else 2 something could not be looked at, such as a model that is not at hand; else
    0.
    """
    from specscope.trace.wire.reading import split_file

    if screen and as_json:
        raise UserError("--tui shows a screen: leave out --json")
    file, text = split_file(place)
    if screen:
        need_terminal(f"specscope locate {shell_word(place)}")
    with ends_at_once():
        reader = read_branch(file, branch)
        need_steps(reader.history, file, "looked at")
        named = checked_place(reader.history, text) if text else None
        chosen = tuple(map(Stage, stages)) or tuple(Stage)
        location = _located(reader.history, file, (target, draft_model, sample), named, chosen)
    if screen:
        from specscope.tui.answer import run_answer
        from specscope.tui.locate import locate_app

        run_answer(partial(locate_app, location, reader.history.vocabulary), lifetime)
    elif as_json:
        print_json(envelope("locate", location.to_dict(), source=[file], code=location.exit, warnings=reader.warnings))
    else:
        from specscope.analyze.locate.text import render_location

        render_location(location, text_console())
    for warning in reader.warnings:
        warn(warning)
    if not screen:
        sys.exit(int(location.exit))


def checked_place(history: History, text: str) -> PlaceName:
    """The place that a text names. Raises UserError where there is no such request, step or node."""
    request, named = history.find(text)
    if named.index is not None:
        from specscope.analyze.why import why_part

        why_part(history, request, named.index, named.node)  # says which there are
    return named


def _located(
    history: History,
    file: str,
    models: tuple[str | None, str | None, int | None],
    place: PlaceName | None,
    stages: tuple[Stage, ...],
) -> Location:
    """Run the search, with a progress bar. Raises UserError."""
    from specscope.live.start import share_cores
    from specscope.measure.judges import audit_options

    share_cores()
    options = audit_options(history, *models)
    from specscope.measure.locate.locate import locate

    with progress_bar() as progress:
        return locate(history, file, options, place=place, stages=stages, progress=progress)
