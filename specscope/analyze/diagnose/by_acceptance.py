"""What acceptance alone says about a drafter's KV and about decay: a remark, until a model or a check says the same."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Proof, Suspect
from specscope.analyze.diagnose.rates import Rate, chance_of, z_between
from specscope.trace.record.records import Preceded

SIGMAS = 5.0
DROP = 0.75  # of the acceptance elsewhere: harder text alone lowers it less
GARBAGE = 0.5  # likewise, past the end of a table
EDGES = 24  # places at which a change with the context is looked for


def first_level(step: Step) -> float:
    """Whether the first drafted level was accepted."""
    return float(len(step.verdict.path) > 0)


def after(case: Case) -> dict[Preceded, Rate]:
    """Acceptance of the first level by what came before."""
    table: dict[Preceded, Rate] = defaultdict(Rate)
    for step in case.drafting:
        if step.preceded is not None:
            table[step.preceded].add(step.request, first_level(step))
    return table


def drafter_kv_full(case: Case) -> Suspect | None:
    """Acceptance that is lower after a full acceptance, whose last token the drafter never ran."""
    if not case.is_model:
        return None
    table = after(case)
    partial = _joined(table, Preceded.PARTIAL, Preceded.NOTHING)
    full = table[Preceded.FULL]
    line = f"first level accepted {full} after a full acceptance, {partial} after less"
    return _fell(case, Cause.DRAFTER_KV, Preceded.FULL, partial, full, line)


def drafter_kv_preemption(case: Case) -> Suspect | None:
    """Acceptance that is lower after a preemption: the drafter's cache should be empty then, and its drafts as good."""
    if not case.is_model:
        return None
    since, before = Rate(), Rate()
    lost: set[str] = set()
    for step in case.drafting:
        if step.preceded is Preceded.PREEMPTION:
            lost.add(step.request)
        (since if step.request in lost else before).add(step.request, first_level(step))
    line = f"first level accepted {since} after a preemption, {before} before any"
    return _fell(case, Cause.DRAFTER_KV, Preceded.PREEMPTION, before, since, line)


def drafter_rotary(case: Case) -> Suspect | None:
    """Acceptance that breaks down from some length of the context on."""
    steps = case.drafting
    if not case.is_model or len(steps) < 100:
        return None
    positions = np.array([step.part.position for step in steps])
    best, line, example = 0.0, "", None
    for edge in np.unique(np.quantile(positions, np.linspace(0.1, 0.9, EDGES)).astype(int)):
        below, beyond = Rate(), Rate()
        for step, position in zip(steps, positions, strict=True):
            (below if position < edge else beyond).add(step.request, first_level(step))
        z = z_between(below, beyond)
        if z > best and beyond.share < GARBAGE * below.share:
            best = z
            line = f"first level accepted {below} in contexts below {edge:,} tokens, {beyond} beyond"
            example = next(step for step, p in zip(steps, positions, strict=True) if p >= edge).reference()
    if best < SIGMAS + 2:
        return None
    lines = (line, f"{best:.0f} standard errors apart")
    return Suspect(Cause.POSITIONS, Proof.SUM, lines, example=example, chance=EDGES * chance_of(best))


def kv_decay(case: Case) -> Suspect | None:
    """Acceptance that falls from early requests to late ones, for no reason in the text."""
    names = list(dict.fromkeys(step.request for step in case.drafting))
    if len(names) < 12:
        return None
    best, line, example = 0.0, "", None
    cuts = range(len(names) // 4, 3 * len(names) // 4 + 1)
    for cut in cuts:
        early, late, old = Rate(), Rate(), set(names[:cut])
        for step in case.drafting:
            rate = early if step.request in old else late
            rate.add(step.request, len(step.verdict.path), max(step.tree.max_depth, 1))
        z = z_between(early, late)
        if z > best and late.share < 0.6 * early.share:
            best, example = z, next(step for step in case.drafting if step.request not in old).reference()
            line = f"of the drafts' depth {early} was accepted in the first {cut} requests, {late} in the others"
    if best < SIGMAS + 2:
        return None
    lines = (line, f"{best:.0f} standard errors apart")
    return Suspect(Cause.TARGET_KV, Proof.SUM, lines, example=example, chance=len(cuts) * chance_of(best))


def _joined(table: dict[Preceded, Rate], *kinds: Preceded) -> Rate:
    """The rates of several kinds as one."""
    both = Rate()
    for kind in kinds:
        for request, (hits, total) in table[kind].by_request.items():
            both.add(request, hits, total)
    return both


def _fell(case: Case, cause: Cause, kind: Preceded, usual: Rate, since: Rate, line: str) -> Suspect | None:
    """A cause of acceptance that fell from `usual` to `since`, after steps of this kind; None where it did not."""
    z = z_between(usual, since)
    if z < SIGMAS or since.share > DROP * usual.share:
        return None
    example = next(step.reference() for step in case.drafting if step.preceded is kind)
    return Suspect(cause, Proof.SUM, (line,), example=example, chance=chance_of(z))
