"""`specscope diagnose`: name the cause of what is wrong with a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from specscope import __version__
from specscope.analyze.findings import Exit
from specscope.analyze.locate.located import Stage
from specscope.cli.arguments import PLACE, X_RULE, whole_from
from specscope.cli.captures import judge_each, need_steps, progress_bar, read_branch, source_options
from specscope.cli.help import verb
from specscope.cli.options import (
    branch_option,
    flag,
    head_option,
    json_option,
    own_drafter_option,
    refuse_others,
    target_option,
)
from specscope.cli.streams import need_terminal, warn
from specscope.envelope import of_capture
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.record.vocabulary import shell_word
from specscope.trace.wire.reading import CaptureReader, split_file

if TYPE_CHECKING:
    from specscope.analyze.audit.options import Options
    from specscope.analyze.diagnose.diagnosis import Diagnosis, JudgedCase
    from specscope.analyze.locate.located import Location
    from specscope.trace.history.history import History

Judge = Callable[[str], Mapping[str, Any]]  # of a file, its findings as JSON
SAMPLE = 300  # steps that the models judge, unless --only is given


@dataclass(frozen=True)
class JudgeFlags:
    """What the flags ask of the judges."""

    target: str | None
    draft_model: str | None
    sample: int | None
    drafter: str | None
    branch: int | None
    as_json: bool

    def read(self, file: str) -> CaptureReader:
        """A capture that has steps, at the end of the branch. Raises UserError."""
        reader = read_branch(file, self.branch)
        need_steps(reader.history, file)
        return reader


@verb(epilog=X_RULE)
@click.argument("captures", nargs=-1, required=True, type=PLACE, metavar="CAPTURE...")
@flag("--only", "Run only this stage.", click.Choice(["audit", "locate"]))
@target_option
@head_option
@own_drafter_option
@flag(
    "--sample N",
    f"Steps that the models judge, over the run.  [default: {SAMPLE}; all with --only]",
    whole_from(1, 2**31),
)
@flag(
    "--stage,stages",
    "Only this part of a step. With --only locate; repeatable.  [default: all]",
    click.Choice([stage.value for stage in Stage]),
    multiple=True,
)
@flag("--screen", "Show every operation on a screen. With --only locate.")
@flag("--trainer FOLDER", "Only compare the head with its training folder.")
@flag("--no-audit", "Judge from the capture only; load no model.")
@flag("--no-known", "Match no known causes. Show only where it breaks.")
@branch_option
@json_option
@source_options
@click.pass_obj
def diagnose(lifetime: Lifetime, /, captures: tuple[str, ...], only: str | None, screen: bool, **flags: Any) -> None:  # noqa: ANN401
    """Name what is wrong with a run, the likeliest cause first.

    \b
      specscope diagnose run.jsonl
      specscope diagnose run*.jsonl --no-audit                 one by one
      specscope diagnose run.jsonl --only audit                every step against the models
      specscope diagnose run.jsonl#r3@17 --only locate         every operation of a step against transformers
      specscope diagnose run.jsonl --trainer head              the head against the folder it was trained in

    Checks the capture (verify). If the models are available, plain transformers computes p and q again for the recorded
    paths (audit). If they disagree, it reruns the models with known mistakes to see which reproduces the difference,
    and finds the first operation that differs (locate). Each cause comes with figures and a command for an example. If
    nothing is wrong, the engine runs a few steps again in float32 and checks every operation.

    Exit code: 1 if something is wrong; else 2 if something could not be judged (a model is missing, say); else 0.
    """
    stages, trainer, no_audit, no_known = (flags.pop(name) for name in ("stages", "trainer", "no_audit", "no_known"))
    asked = JudgeFlags(**flags)
    _check_flags(captures, only, trainer, has_parts=bool(stages or screen), no_screen=not screen or not asked.as_json)
    judges: Mapping[str | None, Judge] = {
        None: partial(_examine, asked=asked, models=not no_audit, known=not no_known),
        "audit": partial(audited, asked=asked),
        "locate": partial(located, asked=asked, stages=stages, lifetime=lifetime, screen=screen),
    }
    judge = judges[only] if trainer is None else partial(beside_training, asked=asked, folder=trainer)
    if not no_audit:
        from specscope.live.start import share_cores

        share_cores()
    with ends_at_once():
        code = judge_each("diagnose", captures, judge, as_json=asked.as_json)
    sys.exit(0 if screen else code)


def _check_flags(
    captures: tuple[str, ...], only: str | None, trainer: str | None, *, has_parts: bool, no_screen: bool
) -> None:
    """Refuse flags that do not go together. Raises UserError."""
    places = [capture for capture in captures if split_file(capture)[1]]
    if only != "locate" and (has_parts or places):
        what = f"{places[0]} names a place: give the whole capture or add" if places else "--stage and --screen need"
        raise UserError(f"{what} --only locate")
    if only == "locate" and len(captures) > 1:
        raise UserError("--only locate takes one capture or one place in it")
    if not no_screen:
        raise UserError("--screen shows a screen: leave out --json")
    if only is not None:
        more = {"drafter"} if only == "audit" else set()
        refuse_others(f"--only {only}", "runs only this stage", refused={"no_audit", "no_known", *more})
    if click.get_current_context().params["no_audit"]:
        refuse_others("--no-audit", "asks no drafter", refused={"drafter"})
    if trainer is not None:
        without = {"sample", "drafter", "no_audit", "no_known", "stages", "screen"}
        refuse_others("--trainer", "compares whole folders", refused=without)
        if only == "locate":
            raise UserError("--trainer compares whole folders: leave out --only")


def _examine(file: str, *, asked: JudgeFlags, models: bool, known: bool) -> Mapping[str, Any]:
    """Diagnose a capture; printed in words unless as JSON. Raises UserError."""
    reader = asked.read(file)
    options, why = _options(reader.history, asked) if models else (None, "")
    left_out, declined = [why] if why else [], [] if models else ["the audit was skipped: you gave --no-audit"]
    more = {"warnings": reader.warnings, "known": known, "left_out": left_out, "declined": declined}
    diagnosis = diagnosis_of(reader.history, file, options, **more)
    if not asked.as_json:
        from specscope.analyze.diagnose.text import render_diagnosis

        render_diagnosis(diagnosis, file, text_console())
    warnings = (*reader.warnings, *(() if options is None else options.notes))
    for warning in warnings:
        warn(warning)
    return of_capture(file, diagnosis.to_dict(file), code=diagnosis.exit, warnings=warnings)


def diagnosis_of(history: History, file: str, options: Options | None, **more: Any) -> Diagnosis:  # noqa: ANN401
    """What diagnose finds; `more`: as `examine` takes it. Raises UserError."""
    from specscope.analyze.diagnose.run import examine

    with progress_bar() as progress:

        def place_of(session: JudgedCase, little: bool) -> Location:
            from specscope.measure.locate.locate import locate

            return locate(session, progress=progress, little=little)

        diagnosis = examine(history, file, options, progress=progress, locate=place_of, **more)
    return replace(diagnosis, builds=f"{diagnosis.builds}; judged by specscope {__version__}")


def said_of(history: History, file: str, warnings: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether diagnose finds something wrong with a run, and what it prints. Raises UserError."""
    from specscope.analyze.diagnose.text import render_diagnosis
    from specscope.live.start import share_cores

    share_cores()
    options, why = _options(history, JudgeFlags(None, None, None, None, None, as_json=False))
    diagnosis = diagnosis_of(history, file, options, warnings=warnings, left_out=[why] if why else [])
    text = StringIO()
    render_diagnosis(diagnosis, file, Console(file=text, width=110, no_color=True))
    return diagnosis.exit is Exit.INCONSISTENT, text.getvalue().splitlines()


def _options(history: History, asked: JudgeFlags) -> tuple[Options | None, str]:
    """The models that judge, or why there are none. Raises UserError where one was named and cannot judge."""
    from specscope.measure.judges import audit_options

    try:
        options = audit_options(history, asked.target, asked.draft_model, asked.sample or SAMPLE, asked.drafter)
    except UserError as error:
        if asked.target is not None or asked.draft_model is not None or asked.drafter is not None:
            raise
        return None, f"audit: {error}"
    return options, options.why_no_draft and f"audit of the drafter: {options.why_no_draft}"


def audited(file: str, asked: JudgeFlags) -> Mapping[str, Any]:
    """Audit a capture; printed in words unless as JSON. Raises UserError."""
    from specscope.analyze.audit.audit import audit, render_audit
    from specscope.measure.judges import audit_options

    reader = asked.read(file)
    with progress_bar() as progress:
        options = audit_options(reader.history, asked.target, asked.draft_model, asked.sample)
        result = audit(reader.history, file, options, progress)
    if not asked.as_json:
        render_audit(result, text_console())
    return _told(file, "audit", result, (*reader.warnings, *result.notes), reader.warnings)


def beside_training(file: str, asked: JudgeFlags, folder: str) -> Mapping[str, Any]:
    """Compare the head that served a capture with the folder that it was trained in. Raises UserError."""
    from specscope.measure.trainer import audit_trainer, render_trainer

    reader = asked.read(file)
    compared = audit_trainer(reader.history, file, folder, asked.target, asked.draft_model)
    if not asked.as_json:
        render_trainer(compared, text_console())
    return _told(file, "audit", compared, (*reader.warnings, *compared.warnings), reader.warnings)


def located(
    place: str, asked: JudgeFlags, stages: tuple[str, ...], lifetime: Lifetime, *, screen: bool
) -> Mapping[str, Any]:
    """Name the first operation that is wrong; as text, unless as JSON or on a screen. Raises UserError."""
    from specscope.analyze.why import why_part
    from specscope.measure.judges import audit_options

    file, text = split_file(place)
    if screen:
        need_terminal(f"specscope diagnose --only locate {shell_word(place)}")
    reader = asked.read(file)
    history = reader.history
    request, named = history.find(text) if text else (None, None)
    if request is not None and named is not None and named.index is not None:
        why_part(history, request, named.index, named.node)  # raises, and says which there are
    options = audit_options(history, asked.target, asked.draft_model, asked.sample, asked.drafter)
    from specscope.analyze.diagnose.diagnosis import JudgedCase
    from specscope.measure.locate.locate import locate

    with progress_bar() as progress:
        chosen = tuple(map(Stage, stages)) or tuple(Stage)
        session = JudgedCase.of(history, file, options, progress)
        location = locate(session, place=named, stages=chosen, progress=progress)
    if screen:
        from specscope.tui.app import run_answer
        from specscope.tui.screens.locate import LocateScreen, help_lines

        first = lambda look: LocateScreen(look, location)  # noqa: E731
        run_answer(lifetime, "specscope diagnose", first, help_lines, history.vocabulary)
    elif not asked.as_json:
        from specscope.analyze.locate.text import render_location

        render_location(location, text_console())
    return _told(file, "locate", location, reader.warnings, reader.warnings)


def _told(file: str, stage: str, found: Any, warnings: Any, shown: list[str]) -> Mapping[str, Any]:  # noqa: ANN401
    """What a stage found in a file, as JSON. `shown`: of the warnings those that its text does not have."""
    for warning in shown:
        warn(warning)
    return of_capture(file, {"stages": {stage: found.to_dict()}}, code=found.exit, warnings=warnings)
