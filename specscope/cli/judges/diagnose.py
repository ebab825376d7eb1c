"""`specscope diagnose`: name the cause of what is wrong with a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from specscope import __version__
from specscope.cli.captures import (
    captures_argument,
    fetches_captures,
    json_option,
    judge_each,
    need_steps,
    read_branch,
)
from specscope.cli.numbers import whole_from
from specscope.cli.streams import warn
from specscope.envelope import of_capture
from specscope.errors import UserError
from specscope.terminal import text_console
from specscope.trace.history.wording import failures

if TYPE_CHECKING:
    from specscope.analyze.audit.options import Options
    from specscope.analyze.diagnose.judged import JudgedCase
    from specscope.analyze.locate.located import Location
    from specscope.trace.history.history import History


@click.command()
@captures_argument
@click.option("--target", metavar="MODEL", help="The target that judges.  [default: the capture's]")
@click.option("--draft-model", metavar="MODEL", help="The drafter's model or EAGLE head.  [default: the capture's]")
@click.option(
    "--sample",
    type=whole_from(1, 2**31),
    default=300,
    show_default=True,
    metavar="N",
    help="Steps that the models judge, spread over the run.",
)
@click.option("--no-audit", is_flag=True, help="Judge by the capture alone: load no model.")
@click.option("--no-known", is_flag=True, help="Name no known cause: show only where it breaks, as `locate` does.")
@click.option("--branch", type=whole_from(0, 2**31), metavar="N", help="Judge this branch.  [default: the last]")
@json_option("Print JSON.")
@fetches_captures
def diagnose(
    captures: tuple[str, ...],
    target: str | None,
    draft_model: str | None,
    sample: int,
    no_audit: bool,
    no_known: bool,
    branch: int | None,
    as_json: bool,
) -> None:
    """Name what is wrong with the run in CAPTURE, the most likely cause first.

    \b
      specscope diagnose run.jsonl
      specscope diagnose run*.jsonl --no-audit            each by itself

    Runs `verify`, and `audit` if the models are available. If the models disagree with the capture, they are rerun with
    known mistakes, to see which one reproduces it, and `locate` finds the first operation that differs. Each cause
    comes with the figures for and against it, and a command that shows an example. Where nothing is wrong, the engine
    runs a few steps of one request again in float32, and every operation, p, q and verdict in them is checked.

    Exit code: 1 something is wrong; else 2 something could not be judged, such as a model that is not at hand; else 0.
    """

    def examined(file: str) -> Mapping[str, Any]:
        models = None if no_audit else JudgeFlags(target, draft_model, sample)
        return _examine(file, branch, models, known=not no_known, as_json=as_json)

    sys.exit(judge_each("diagnose", captures, examined, as_json=as_json))


@dataclass(frozen=True)
class JudgeFlags:
    """Which models judge, as the flags say."""

    target: str | None
    draft_model: str | None
    sample: int


def _examine(
    file: str, branch: int | None, models: JudgeFlags | None, *, known: bool, as_json: bool
) -> Mapping[str, Any]:
    """Diagnose a capture; printed in words unless `as_json`. Raises UserError."""
    from specscope.analyze.diagnose.run import examine

    reader = read_branch(file, branch)
    need_steps(reader.history, file)
    options, why = (None, "") if models is None else _options(reader.history, models)
    from specscope.cli.judges.audit import progress_bar

    with progress_bar() as progress:

        def place_of(session: JudgedCase, little: bool) -> Location:
            from specscope.measure.locate.locate import locate_in

            return locate_in(session, progress=progress, little=little)

        diagnosis = examine(
            reader.history,
            file,
            options,
            left_out=[why] if why else [],
            declined=["audit: --no-audit was given"] if models is None else [],
            warnings=reader.warnings,
            progress=progress,
            known=known,
            locate=place_of,
        )
    diagnosis = replace(diagnosis, builds=f"{diagnosis.builds}; judged by specscope {__version__}")
    if not as_json:
        from specscope.analyze.diagnose.text import render_diagnosis

        render_diagnosis(diagnosis, file, text_console())
    failed = failures(request.end for request in reader.history.requests.values())
    warnings = (*reader.warnings, *failed, *(() if options is None else options.notes))
    for warning in warnings:
        warn(warning)
    return of_capture(file, diagnosis.to_dict(file), code=diagnosis.exit, warnings=warnings)


def _options(history: History, asked: JudgeFlags) -> tuple[Options | None, str]:
    """The models that judge, or why there are none. Raises UserError where one was named and cannot judge."""
    from specscope.live.start import share_cores
    from specscope.measure.judges import audit_options

    share_cores()
    try:
        options = audit_options(history, asked.target, asked.draft_model, asked.sample)
    except UserError as error:
        if asked.target is not None or asked.draft_model is not None:
            raise
        return None, f"audit: {error}"
    return options, options.why_no_draft and f"audit of the drafter: {options.why_no_draft}"
