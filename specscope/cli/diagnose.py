"""`specscope verify` and `diagnose`: is a run consistent and lossless, and what is the cause where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Annotated, Any

import click
from msgspec import Meta
from rich.console import Console
from rich.text import Text

from specscope import __version__
from specscope.analyze.findings import Exit
from specscope.analyze.locate.located import Stage
from specscope.analyze.verify.trial import judge, render_check, render_trial
from specscope.cli import captures as reading
from specscope.cli import options
from specscope.cli.help import verb
from specscope.cli.options import PLACE, X_RULE, Number, flag, refuse_others, whole_from
from specscope.cli.streams import need_terminal, warn
from specscope.engine.config import load_rule
from specscope.envelope import of_capture
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.speculate.named import NamedCode
from specscope.terminal import text_console
from specscope.testing.calls import judge_calls, read_calls
from specscope.trace.kinds import ARRAYS, TENSORS, kind_of, start_of
from specscope.trace.record.vocabulary import printable, shell_word
from specscope.trace.wire.reading import split_file

if TYPE_CHECKING:
    from specscope.analyze.audit.options import Options
    from specscope.analyze.diagnose.diagnosis import Diagnosis, JudgedCase
    from specscope.analyze.locate.located import Location
    from specscope.trace.history.history import History

Share = Annotated[float, Meta(gt=0, lt=1, description="above 0 and below 1")]
MOST_SHOWN = 10  # calls whose outputs are impossible
SAMPLE = 300  # steps that the models judge, unless --only is given
Found = Any  # of a stage: has an exit code, and is JSON


@verb(epilog=X_RULE)
@reading.captures_argument
@options.json_option
@flag(
    "--alpha P",
    "Chance that a run without a fault fails. Of all statistical checks together.",
    Number(Share),
    default=0.01,
)
@flag(
    "--rule RULE",
    "Rule of the run, if it is your own. As module:function; for calls: standard, match, block or greedy.",
)
@options.branch_option
@reading.source_options
def verify(captures: tuple[str, ...], *, as_json: bool, alpha: float, rule: str | None, branch: int | None) -> None:
    """Check that a run is consistent and lossless, from its capture alone.

    \b
      specscope verify run.jsonl
      specscope verify run*.jsonl      one by one
      specscope verify call.npz        calls of a sampler: p, q, drafted, output, coin

    No model is needed. It recomputes each step's verdict from the recorded numbers, tracks positions, tokens and KV
    blocks from step to step, and tests over the whole run whether the accepted and drawn tokens fit the recorded
    probabilities. Each statistical check that passes shows the smallest bias it would have seen.

    Exit code: 0 consistent, 1 not consistent, 2 cannot be judged. For several captures, 1 beats 2 and 2 beats 0.
    """

    def judged(file: str) -> Mapping[str, Any]:
        if kind_of(start_of(file)) in (ARRAYS, TENSORS):
            if branch is not None:
                raise UserError(f"{printable(file)} is no capture and has no branches: leave out --branch")
            return judge_file(file, rule, alpha, as_json=as_json)
        own_rule = None if rule is None else load_rule(rule, NamedCode.find(rule, "--rule"))
        reader = reading.read_branch(file, branch, "judged")
        trial = judge(reader.history, source=file, alpha=alpha, warnings=reader.warnings, own_rule=own_rule)
        if not as_json:
            render_trial(trial, text_console())
        return of_capture(file, trial.to_dict(), code=trial.exit, warnings=trial.notes)

    sys.exit(reading.judge_each("verify", captures, judged, as_json=as_json))


def judge_file(file: str, rule: str | None, alpha: float, *, as_json: bool) -> Mapping[str, Any]:
    """Judge the calls of a sampler in a file of arrays. Raises UserError."""
    calls, notes = read_calls(file)
    found = judge_calls(calls, rule, alpha)
    if not as_json:
        console = text_console()
        warn(*notes)
        for place, check in enumerate(found.checks):
            render_check(check, file, console)
            for number, words in () if place else found.impossible[1:MOST_SHOWN]:  # the first is that check's example
                console.print(Text(f"    call {number}: {words}"), soft_wrap=True)
        if found.fits:
            for name, words in found.refuted.items():
                console.print(Text(f"not {name}: {words}"), soft_wrap=True)
        console.print(Text(f"\n{found}", style="bold" if found.fits else "bold red"), soft_wrap=True)
    return of_capture(file, found.to_dict(), code=found.exit, warnings=notes)


@verb(epilog=X_RULE)
@click.argument("captures", nargs=-1, required=True, type=PLACE, metavar="CAPTURE...")
@flag("--only", "Run only this stage.", click.Choice(["audit", "locate"]))
@options.target_option
@options.head_option
@options.own_drafter_option
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
@options.branch_option
@options.json_option
@reading.source_options
@click.pass_obj
def diagnose(lifetime: Lifetime, /, captures: tuple[str, ...], **flags: Any) -> None:  # noqa: ANN401
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
    asked = JudgeFlags(**flags)
    asked.check(captures)
    judges: Mapping[str | None, Callable[[str, JudgeFlags], Mapping[str, Any]]]
    judges = {None: _examine, "audit": audited, "locate": partial(located, lifetime=lifetime)}
    judge = judges[asked.only] if asked.trainer is None else beside_training
    if not asked.no_audit:
        from specscope.live.start import share_cores

        share_cores()
    with ends_at_once():
        code = reading.judge_each("diagnose", captures, lambda file: judge(file, asked), as_json=asked.as_json)
    sys.exit(code)


@dataclass(frozen=True)
class JudgeFlags:
    only: str | None = None
    target: str | None = None
    draft_model: str | None = None
    drafter: str | None = None
    sample: int | None = None
    stages: tuple[str, ...] = ()
    screen: bool = False
    trainer: str | None = None
    no_audit: bool = False
    no_known: bool = False
    branch: int | None = None
    as_json: bool = False

    def check(self, captures: tuple[str, ...]) -> None:
        place = next((capture for capture in captures if split_file(capture)[1]), None)
        if self.only != "locate" and (self.stages or self.screen or place):
            what = f"{place} names a place: give the whole capture or add" if place else "--stage and --screen need"
            raise UserError(f"{what} --only locate")
        if self.only == "locate" and len(captures) > 1:
            raise UserError("--only locate takes one capture or one place in it")
        if self.screen and self.as_json:
            raise UserError("--screen shows a screen: leave out --json")
        if self.only is not None:
            others = {"no_audit", "no_known"} | ({"drafter"} if self.only == "audit" else set())
            refuse_others(f"--only {self.only}", "runs only this stage", refused=others)
        if self.no_audit:
            refuse_others("--no-audit", "asks no drafter", refused={"drafter"})
        if self.trainer is not None:
            others = {"sample", "drafter", "no_audit", "no_known", "stages", "screen"}
            others |= {"only"} if self.only == "locate" else set()
            refuse_others("--trainer", "compares whole folders", refused=others)

    def models(self, history: History, sample: int | None) -> Options:
        from specscope.measure.judges import audit_options

        return audit_options(history, self.target, self.draft_model, sample, self.drafter)

    def models_or_why(self, history: History) -> tuple[Options | None, list[str]]:
        """The models that judge, and what they leave out. Raises UserError where one was named and cannot judge."""
        try:
            models = self.models(history, self.sample or SAMPLE)
        except UserError as error:
            if self.target is not None or self.draft_model is not None or self.drafter is not None:
                raise
            return None, [f"audit: {error}"]
        return models, [f"audit of the drafter: {models.why_no_draft}"] if models.why_no_draft else []

    def told(
        self, file: str, stage: str, found: Found, render: Callable[..., None], warnings: Sequence[str], *noted: str
    ) -> Mapping[str, Any]:
        """What a stage found, as JSON; in words unless that was asked for. `noted`: warnings that its text has."""
        if not self.as_json and not self.screen:
            render(found, text_console())
        warn(*warnings)
        return of_capture(file, {"stages": {stage: found.to_dict()}}, code=found.exit, warnings=(*warnings, *noted))


def _examine(file: str, asked: JudgeFlags) -> Mapping[str, Any]:
    from specscope.analyze.diagnose.diagnosis import render_diagnosis

    reader = reading.read_branch(file, asked.branch, "judged")
    models, left_out = (None, []) if asked.no_audit else asked.models_or_why(reader.history)
    declined = ["the audit was skipped: you gave --no-audit"] if asked.no_audit else []
    more = {"warnings": reader.warnings, "known": not asked.no_known, "left_out": left_out, "declined": declined}
    diagnosis = diagnosis_of(reader.history, file, models, **more)
    if not asked.as_json:
        render_diagnosis(diagnosis, file, text_console())
    warnings = (*reader.warnings, *(() if models is None else models.notes))
    warn(*warnings)
    return of_capture(file, diagnosis.to_dict(file), code=diagnosis.exit, warnings=warnings)


def diagnosis_of(history: History, file: str, models: Options | None, **more: Any) -> Diagnosis:  # noqa: ANN401
    """What diagnose finds; `more`: as `examine` takes it. Raises UserError."""
    from specscope.analyze.diagnose.run import examine

    with reading.progress_bar() as progress:

        def place_of(session: JudgedCase, little: bool) -> Location:
            from specscope.measure.locate.locate import locate

            return locate(session, progress=progress, little=little)

        diagnosis = examine(history, file, models, progress=progress, locate=place_of, **more)
    return replace(diagnosis, builds=f"{diagnosis.builds}; judged by specscope {__version__}")


def said_of(history: History, file: str, warnings: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether diagnose finds something wrong with a run, and what it prints. Raises UserError."""
    from specscope.analyze.diagnose.diagnosis import render_diagnosis
    from specscope.live.start import share_cores

    share_cores()
    models, left_out = JudgeFlags().models_or_why(history)
    diagnosis, text = diagnosis_of(history, file, models, warnings=warnings, left_out=left_out), StringIO()
    render_diagnosis(diagnosis, file, Console(file=text, width=110, no_color=True))
    return diagnosis.exit is Exit.INCONSISTENT, text.getvalue().splitlines()


def audited(file: str, asked: JudgeFlags) -> Mapping[str, Any]:
    from specscope.analyze.audit.audit import audit, render_audit

    reader = reading.read_branch(file, asked.branch, "judged")
    with reading.progress_bar() as progress:
        result = audit(reader.history, file, asked.models(reader.history, asked.sample), progress)
    return asked.told(file, "audit", result, render_audit, reader.warnings, *result.notes)


def beside_training(file: str, asked: JudgeFlags) -> Mapping[str, Any]:
    """Compare the head that served a capture with the folder that it was trained in. Raises UserError."""
    from specscope.measure.trainer import audit_trainer, render_trainer

    reader = reading.read_branch(file, asked.branch, "judged")
    compared = audit_trainer(reader.history, file, asked.trainer or "", asked.target, asked.draft_model)
    return asked.told(file, "audit", compared, render_trainer, reader.warnings, *compared.warnings)


def located(place: str, asked: JudgeFlags, lifetime: Lifetime) -> Mapping[str, Any]:
    """Name the first operation that is wrong; on a screen where that was asked for. Raises UserError."""
    from specscope.analyze.locate.text import render_location
    from specscope.analyze.why import why_part

    file, text = split_file(place)
    if asked.screen:
        need_terminal(f"specscope diagnose --only locate {shell_word(place)}")
    reader = reading.read_branch(file, asked.branch, "judged")
    history = reader.history
    request, named = history.find(text) if text else (None, None)
    if request is not None and named is not None and named.index is not None:
        why_part(history, request, named.index, named.node)  # raises, and says which there are
    models = asked.models(history, asked.sample)
    from specscope.analyze.diagnose.diagnosis import JudgedCase
    from specscope.measure.locate.locate import locate

    with reading.progress_bar() as progress:
        session = JudgedCase.of(history, file, models, progress)
        stages = tuple(map(Stage, asked.stages)) or tuple(Stage)
        location = locate(session, place=named, stages=stages, progress=progress)
    if asked.screen:
        from specscope.tui.app import answer_app, run
        from specscope.tui.screens.locate import LocateScreen, help_lines

        first = lambda look: LocateScreen(look, location)  # noqa: E731
        run(answer_app("specscope diagnose", first, help_lines, history.vocabulary), lifetime)
    return asked.told(file, "locate", location, render_location, reader.warnings)
