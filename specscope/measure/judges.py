"""Which models judge a capture: those named on the command line, else those that the capture names, if they are on
this machine and their digest is the recorded one. These are never downloaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specscope.analyze.audit.options import ModelSource, Options
from specscope.engine.config import DEFAULT_HEAD, DRAFTERS, EngineConfig, given_digest
from specscope.errors import UserError, not_loaded
from specscope.model.places import NAME, check_model, head_place, hush, model_place, on_disk
from specscope.plans.kinds import check_kind, is_head, lies_in_target, model_part, runs_head, unread_layers
from specscope.plans.model_digest import model_digest, shown
from specscope.plans.plan import DynamicPlan, read_plan
from specscope.speculate.named import NamedCode
from specscope.trace.history.history import History
from specscope.trace.record.records import RunInfo
from specscope.trace.record.rules import STANDARD, is_own
from specscope.tree_shape import MAX_NODES
from specscope.whole_file import read_object

FIRST = ", first "  # in the name of a model that is a target's first layers


def audit_options(
    history: History, target: str | None, draft_model: str | None, sample: int | None, drafter: str | None = None
) -> Options:
    """The models that judge a capture: those that are named, else those that the capture names. Raises UserError."""
    run = history.run
    if run is None:
        raise UserError("the capture does not say what ran (its header is missing): cannot be audited")
    if not run.tells_tokens:
        raise UserError(f"{run.privacy.lack}: the models cannot be fed the recorded tokens")
    if target is not None:
        check_model(target)  # before torch is imported
    if draft_model is not None and runs_head(run.drafter):
        head_place(draft_model)
    hush(gguf=True)
    notes, name = list[str](), target_named(run, target)
    judge = _source(name, run.target, run.target_digest, "--target", notes, given=target is not None)
    draft, why = _draft(run, judge, draft_model, notes)
    return Options(judge, draft, sample, why_no_draft=why, notes=tuple(notes), own=_own_drafter(run, drafter))


def target_named(run: RunInfo, given: str | None) -> str | None:
    """The value of --target, or what it would be for the capture's target; None for the default model."""
    if given is not None:
        return given
    return run.target_path or (None if run.target == NAME else run.target)


def draft_named(run: RunInfo, given: str | None) -> str | None:
    """The same for --draft-model; None for the default head or model, and where the drafter is not a model."""
    part = model_part(run.drafter)
    if given is not None or run.draft_path or part != "draft_model":
        return given if given is not None else run.draft_path or None
    name, first, layers = run.draft_model.partition(FIRST)
    return f"self:{layers.split()[0]}" if first else None if name == NAME else name


def _own_drafter(run: RunInfo, named: str | None) -> dict[str, Any]:
    """The settings of an engine that drafts as what --drafter names. Raises UserError."""
    if named is not None and run.drafter in DRAFTERS:
        raise UserError(f"--drafter {named}: the capture's drafter is {run.drafter}, so leave it out")
    return {} if named is None else {"drafter": named, "own": NamedCode.find(named, "--drafter"), "tree": run.tree}


def engine_config_of(run: RunInfo, target: str | None, draft_model: str | None, **more: Any) -> EngineConfig:  # noqa: ANN401
    """The configuration of the engine that made a capture: of an older one whose model drafted beside a text the model
    alone. What a capture names of somebody's own is never imported: nothing drafts, and the standard rule judges.
    """
    drafter, draft, tree = model_part(run.drafter) or run.drafter, draft_named(run, draft_model), run.tree
    if draft is None and drafter == "draft_model":
        draft = run.draft_model
    if drafter != run.drafter and isinstance(plan := read_plan(tree), DynamicPlan):
        tree = str(replace(plan, nodes=min(plan.candidates, MAX_NODES)))
    if lies_in_target(drafter):
        draft = None
    if run.is_ours and drafter not in DRAFTERS:
        drafter, draft, tree = "none", None, ""
    settings: dict[str, Any] = {"drafter": drafter, "draft_model": draft, "tree": tree or None, "dtype": run.dtype}
    settings |= {"rule": STANDARD if is_own(run.rule) else run.rule, "max_context": run.max_context, **more}
    return EngineConfig(target=target_named(run, target), **settings)


def _source(name: str | None, recorded: str, digest: str, flag: str, notes: list[str], *, given: bool) -> ModelSource:
    """Where a model is: `name` is from `flag`, or from the capture. Raises UserError."""
    from transformers import AutoConfig

    from specscope.model.loader import find_model

    own = None if given else name  # what only the capture names: it is looked for without access to the hub
    missing = UserError(f"the capture's model {recorded} was not found: give {flag} MODEL")
    if own is not None and on_disk(own) is None:
        raise missing
    try:
        if own is not None and model_place(own) is None:
            path, arguments, known = own, {"local_files_only": True}, own
        else:
            path, arguments, known = find_model(name, lambda _: None)
        AutoConfig.from_pretrained(path, trust_remote_code=False, **arguments)
    except Exception as error:
        if own is None and isinstance(error, UserError):
            raise
        raise (not_loaded(name or recorded, error) if own is None else missing) from error
    _compare("model", recorded, name or path, digest, given_digest(name), f"{flag} MODEL", notes, given=given)
    return ModelSource(path, known, arguments)


def _compare(
    what: str, recorded: str, place: str, then: str, now: str, flag: str, notes: list[str], *, given: bool
) -> None:
    """Note where the model there now is not the one that ran. Raises UserError where nobody has given it."""
    digests = f"digest {shown(now) or 'not known'}, recorded {shown(then)}"
    other, ran = "has other weights or settings", f"the capture's {what} {recorded}"
    if then and then != now and not given:
        raise UserError(f"{ran} at {place} {other} now ({digests}): give {flag}")
    if then and then != now:
        notes.append(f"{flag.split()[0]} {place} {other} than {ran} ({digests})")


def _draft(run: RunInfo, target: ModelSource, given: str | None, notes: list[str]) -> tuple[ModelSource | None, str]:
    """Where the drafter's model is, or why it is not known. Raises UserError where it was given and is not there."""
    part, name, known = model_part(run.drafter), draft_named(run, given), lies_in_target(run.drafter)
    if known or (part != "draft_model" and not runs_head(part)):
        if given is not None:
            what = f"drafter {part} is in its target" if known else f"drafter is {run.drafter}"
            raise UserError(f"--draft-model is given, but the capture's {what}")
        if known and not run.is_ours:  # vLLM's take no token at position 0, and some are fed a state before its norm
            return None, f"there is no judge for this engine's use of the target's own modules ({part})"
        return ModelSource(target.path, target.name, target.arguments, part) if known else None, ""
    try:
        if runs_head(part):
            return _head(run, name, notes, given=given is not None), ""
        if name is not None and name.startswith("self:"):
            if not (count := name.removeprefix("self:")).isdigit():
                raise UserError(f"--draft-model {name}: write self:N, for the target's first N layers")
            arguments = {**target.arguments, "num_hidden_layers": int(count)}
            return ModelSource(target.path, f"{target.name}, first {count} layers", arguments), ""
        return _source(name, run.draft_model, run.draft_digest, "--draft-model", notes, given=given is not None), ""
    except UserError as error:
        if given is not None:
            raise
        return None, str(error)


def _head(run: RunInfo, name: str | None, notes: list[str], *, given: bool) -> ModelSource:
    """The same for a head. Raises UserError."""
    flag = "--draft-model HEAD"
    folder = Path(name).expanduser() if name is not None else DEFAULT_HEAD
    there = (folder / "config.json").is_file() and (name is not None or is_head(folder))
    if not there or (name is None and run.draft_model != DEFAULT_HEAD.name):
        missing = f"no head at {folder}: give {flag}, a folder with its config.json"
        raise UserError(missing if given else f"the head {run.draft_model} was not found: give {flag}")
    config = read_object(folder / "config.json")
    check_kind(folder, config, "audit judges EAGLE, EAGLE-3, P-EAGLE and DFlash heads")
    _compare("head", run.draft_model, str(folder), run.draft_digest, model_digest(folder), flag, notes, given=given)
    notes += filter(None, [unread_layers(config)])
    return ModelSource(str(folder), folder.resolve().name, kind=model_part(run.drafter))
