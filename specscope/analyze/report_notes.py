"""What a reader of a report's figures must know: what is missing, forced, lossy or worked out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specscope.trace.history.history import History
from specscope.trace.history.interval import missing_text
from specscope.trace.history.loops import LONGEST, TIMES, TOLD, Loops
from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.method import SOURCES
from specscope.trace.record.records import RequestStep


def loop_notes(loops: Loops) -> list[str]:
    """Of text that loops, where it is enough to change what an acceptance length means."""
    if loops.share is None or loops.share < TOLD:
        return []
    tau = "nothing else was drafted"
    if loops.rest.tau is not None:
        tau = f"without its steps τ is {loops.rest.tau:.2f} over {plural(loops.rest.drafts, 'draft')}"
    return [
        f"{loops.share:.1%} of {plural(loops.tokens, 'output token')} lie in loops (a cycle of up to {LONGEST} tokens "
        f"that comes {TIMES} times or more in a row): acceptance on such text says little of the drafter; {tau}"
    ]


def notes_of(history: History, ended: Sequence[bool], missing: Sequence[int]) -> list[str]:
    """A line each. Of every request: whether it ended, and its output tokens in steps that are missing."""
    notes = _aggregate_notes([step.aggregate for step in history.steps if step.aggregate is not None])
    if history.run is None:
        notes.append("the run's header is missing: its model and settings are unknown")
    if history.lost:
        notes.append(f"{plural(history.lost, 'record')} missing: counts are too low, and ratios are over what is left")
    if len(history.branches) > 1:
        notes.append(
            f"the run was edited and has {len(history.branches)} branches: these figures are of branch "
            f"{history.branch} (--branch N for another)"
        )
    open_ended = len(ended) - sum(ended)
    if open_ended:
        notes.append(
            f"{open_ended} of {plural(len(ended), 'request')} did not end: still running, or the capture was cut off"
        )
    verdicts = [part.verdict for step in history.steps for part in step.requests if part.verdict is not None]
    forced = sum(1 for verdict in verdicts if len(verdict.forced))
    if forced:
        notes.append(
            f"{forced} of {plural(len(verdicts), 'verdict')} forced (a synthetic drafter, or what-if): their "
            "acceptance measures nothing, and the output is not the target's"
        )
    notes += _method_notes([part for step in history.steps for part in step.requests if part.verdict is not None])
    notes += _form_notes([part for step in history.steps for part in step.requests if part.form is not None])
    if any(missing):
        of = plural(sum(map(bool, missing)), "request")
        notes.append(f"{plural(sum(missing), 'output token')} of {of} in steps that are missing")
    return notes


def _method_notes(parts: Sequence[RequestStep]) -> list[str]:
    """Of rules that are not lossless, and of drafts that were left out of verification."""
    lossy = [part for part in parts if part.lossy]
    names = ", ".join(sorted({part.rule for part in lossy}))
    notes = []
    if lossy:
        notes.append(
            f"{len(lossy)} of {plural(len(parts), 'verdict')} under a rule that is not lossless ({names}): the output "
            "is not distributed as the target's own"
        )
    notes += _source_notes(parts)
    unverified = sum(part.method.unverified for part in parts if part.method is not None)
    if unverified:
        notes.append(f"{plural(unverified, 'draft')} not verified, beyond a budget: the figures are of those that were")
    return notes


def _form_notes(parts: Sequence[RequestStep]) -> list[str]:
    """What forms (structured output, min_tokens) took away."""
    if not parts:
        return []
    of = plural(len({part.request for part in parts}), "request")
    told = [part.form.removed for part in parts if part.form is not None and len(part.form.removed)]
    mass = f", on average {100 * float(np.mean(np.concatenate(told))):.1f} % of the target's own mass" if told else ""
    pruned = sum(part.form.pruned for part in parts if part.form is not None)
    drafts = f"; {plural(pruned, 'draft')} pruned before verification" if pruned else ""
    return [
        f"structured output or min_tokens shaped {plural(len(parts), 'step')} of {of}: it removed tokens{mass}{drafts}"
    ]


def _aggregate_notes(told: Sequence[Aggregate]) -> list[str]:
    """What an engine does not tell, and what was worked out."""
    notes = list(dict.fromkeys(missing_text(one) for one in told))
    rounded, resets = sum(one.rounded for one in told), sum(one.reset for one in told)
    if rounded:
        notes.append(
            f"{rounded} of {plural(len(told), 'interval')} with drafts worked out from rounded rates: the nearest "
            "count that fits (~)"
        )
    if resets:
        notes.append(f"{plural(resets, 'restart')} of the engine: its counters began again")
    return notes


def _source_notes(parts: Sequence[RequestStep]) -> list[str]:
    """Where a text drafts beside a model: how much of what each of them drafted was accepted."""
    drafted, accepted = Counter[str](), Counter[str]()
    for part in parts:
        if part.method is not None and len(part.method.source) and part.verdict is not None:
            drafted.update(SOURCES[source] for source in part.method.source.tolist())
            accepted.update(part.method.source_of(node) for node in part.verdict.path.tolist())
    said = [
        f"{name} {accepted[name]:,} of {drafted[name]:,} ({accepted[name] / drafted[name]:.0%})"
        for name in SOURCES
        if drafted[name]
    ]
    return [f"accepted nodes by source: {', '.join(said)}"] if said else []
