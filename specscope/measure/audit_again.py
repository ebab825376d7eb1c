"""`specscope audit --again`: each step run again by our own engine, and the first one that differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specscope.analyze.audit.audit import Audit, chosen_places, step_numbers
from specscope.analyze.audit.options import Progress
from specscope.analyze.audit.tally import Tally
from specscope.analyze.findings import Reference
from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.live.start import start_engine
from specscope.measure.judges import audit_options, draft_named, target_named
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.limits import untold_limits
from specscope.trace.record.method import model_part
from specscope.trace.record.records import ROUNDING, RunInfo

if TYPE_CHECKING:
    from specscope.engine.engine import Engine


def audit_again(
    history: History,
    source: str,
    target: str | None,
    draft_model: str | None,
    sample: int | None,
    progress: Progress = lambda *_: None,
) -> Audit:
    """Judge a capture by an engine of ours. Raises UserError."""
    began = time.perf_counter()
    run = history.run
    options = audit_options(history, target, draft_model, sample)
    assert run is not None  # otherwise audit_options has refused it
    if options.why_no_draft:
        raise UserError(options.why_no_draft)
    engine = start_engine(engine_config_of(run, target, draft_model), lambda what: progress(what, 0, 0))
    places, total = chosen_places(history, sample)
    untold = [name for name in places if (info := history.requests[name].info) and untold_limits(info.params)]
    lacking = [f"{plural(len(untold), 'request')} left out: a form or a bias is not in the capture."] if untold else []
    for name in untold:
        del places[name]
    least = ROUNDING.get(run.dtype, 0.0)
    (tree, p, tokens), audited = _compared(engine, history, places, least, progress)
    return Audit(
        source=source,
        judge="our engine, each step in fresh KV",
        target=options.target.name,
        draft_model=options.draft.name if options.draft else "",
        dtype=run.dtype,
        steps=total,
        audited=audited,
        nodes=len(p.items),
        slack=4 * least,
        draft_slack=0.0,
        findings=tuple(tally.finding(history) for tally in (tree, p, tokens) if tally.items),
        notes=options.notes,
        unjudged=tuple(lacking),
        seconds=time.perf_counter() - began,
    )


def _compared(
    engine: Engine, history: History, places: Mapping[str, Sequence[int]], least: float, progress: Progress
) -> tuple[tuple[Tally, Tally, Tally], int]:
    """Run the steps at these places again: (tallies of trees, of p and of committed tokens), and how many ran.

    `least`: a larger difference between two p is one.
    """
    from specscope.live.audit_again import steps_again

    tree = Tally("drafter tree", "the drafter drafts the same tree again", "step")
    p = Tally("target p", "p of every drafted token comes out again")
    tokens = Tally("committed tokens", "the same coins commit the same tokens again", "step")
    count, done = sum(map(len, places.values())), 0
    show = history.vocabulary.show
    for name, some in places.items():
        for step in steps_again(engine, history.requests[name], step_numbers(history, name), some):
            where = Reference(step.request, step.index, step.step)
            for node, then, now in step.p:
                node_place = Reference(step.request, step.index, step.step, node)
                p.add(node_place, differs=abs(then - now) > least, recorded=then, judged=now)
            if step.tree is not None:
                text = f"now it drafts {_text(step.drafted, show)}"
                tree.add(where, differs=not step.tree, recorded=0, judged=0, text=text)
            if step.tokens is not None:
                text = f"now it commits {_text(step.committed, show)}"
                tokens.add(where, differs=not step.tokens, recorded=0, judged=0, text=text)
            done += 1
            progress("running steps again", done, count)
    return (tree, p, tokens), done


def engine_config_of(run: RunInfo, target: str | None, draft_model: str | None, **more: Any) -> EngineConfig:  # noqa: ANN401
    """The configuration of the engine that made a capture."""
    draft = draft_named(run, draft_model)
    if draft is None and model_part(run.drafter) == "draft_model":
        draft = run.draft_model
    return EngineConfig(
        target=target_named(run, target),
        drafter=run.drafter,
        draft_model=draft,
        tree=run.tree or None,
        dtype=run.dtype,
        max_context=run.max_context,
        **{"rule": run.rule, **more},
    )


def _text(tokens: tuple[int, ...], show: Callable[[int], str]) -> str:
    return " ".join(map(show, tokens)) or "nothing"
