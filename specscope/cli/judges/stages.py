"""The stages of `specscope diagnose` that run by themselves: a capture judged by its models, and where it breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specscope.analyze.locate.located import Stage
from specscope.cli.captures import need_steps, progress_bar, read_branch
from specscope.cli.streams import need_terminal, warn
from specscope.envelope import of_capture
from specscope.lifetime import Lifetime
from specscope.terminal import text_console
from specscope.trace.record.vocabulary import shell_word

if TYPE_CHECKING:
    from specscope.trace.wire.reading import CaptureReader


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
    from specscope.trace.wire.reading import split_file

    file, text = split_file(place)
    if screen:
        need_terminal(f"specscope diagnose --only locate {shell_word(place)}")
    reader = asked.read(file)
    history = reader.history
    request, named = history.find(text) if text else (None, None)
    if request is not None and named is not None and named.index is not None:
        why_part(history, request, named.index, named.node)  # raises, and says which there are
    options = audit_options(history, asked.target, asked.draft_model, asked.sample, asked.drafter)
    from specscope.analyze.diagnose.judged import JudgedCase
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
