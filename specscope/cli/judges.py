"""Which models judge a capture: those that are named on the command line, else those that the capture names."""

from __future__ import annotations

from pathlib import Path

from specscope.analyze.audit.options import Options, Source
from specscope.engine.config import DEFAULT_HEAD, is_head
from specscope.errors import UserError, first_line
from specscope.model.bundled import NAME
from specscope.trace.history import History
from specscope.trace.method import model_part
from specscope.trace.records import RunInfo

FIRST = ", first "  # in the name of a model that is a target's first layers


def audit_options(history: History, target: str | None, draft_model: str | None, sample: int | None) -> Options:
    """The models that judge a capture: those that are named, else those that the capture names. Raises UserError."""
    run = history.run
    if run is None:
        raise UserError("the capture does not say what ran (its header is missing): it cannot be audited")
    judge = _source(target, run.target, "--target")
    draft, why = _draft(run, judge, draft_model)
    return Options(target=judge, draft=draft, sample=sample, why_no_draft=why)


def named(name: str) -> str | None:
    """What --target would be for the target that a capture names; None for the default one."""
    return None if name == NAME else name


def _source(given: str | None, recorded: str, flag: str) -> Source:
    """Where a model lies: the one that `flag` gave, else the one of that name in the capture. Raises UserError."""
    from transformers import AutoConfig

    from specscope.model.loader import find_model

    try:
        path, arguments, name = find_model(given if given is not None else named(recorded), lambda _: None)
        AutoConfig.from_pretrained(path, **arguments)  # what is not there is said before anything is loaded
    except Exception as error:
        if given is None and recorded != NAME:
            raise UserError(f"the capture's model {recorded} is not at hand: give {flag} MODEL") from error
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot load {given or recorded}: {first_line(error)}") from error
    return Source(path, name, arguments)


def _draft(run: RunInfo, target: Source, given: str | None) -> tuple[Source | None, str]:
    """Where the drafter's model lies, or why it is not known. Raises UserError for one that was given and is not."""
    if model_part(run.drafter) == "eagle":
        return _head(run.draft_model, given)
    if model_part(run.drafter) != "draft_model":
        if given is not None:
            raise UserError(f"--draft-model is given, but the capture's drafter is {run.drafter}")
        return None, ""
    before, first, layers = run.draft_model.partition(FIRST)
    if given is None and first:
        given = f"self:{layers.split()[0]}"
    if given is not None and given.startswith("self:"):
        count = given.removeprefix("self:")
        if not count.isdigit():
            raise UserError(f"--draft-model {given}: write self:N, for the target's first N layers")
        arguments = {**target.arguments, "num_hidden_layers": int(count)}
        return Source(target.path, f"{target.name}, first {count} layers", arguments), ""
    try:
        return _source(given, before, "--draft-model"), ""
    except UserError as error:
        if given is not None:
            raise
        return None, str(error)


def _head(recorded: str, given: str | None) -> tuple[Source | None, str]:
    """The same of an EAGLE head."""
    if given is None and recorded != DEFAULT_HEAD.name:
        return None, f"the head {recorded} is not at hand: give --draft-model HEAD"
    folder = Path(given).expanduser() if given is not None else DEFAULT_HEAD
    if not (folder / "config.json").is_file() or (given is None and not is_head(folder)):
        raise UserError(f"no EAGLE head at {folder}: give --draft-model HEAD, a folder with its config.json")
    return Source(str(folder), folder.resolve().name), ""
