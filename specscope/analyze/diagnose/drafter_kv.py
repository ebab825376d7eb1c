"""Causes in a drafter's own KV and positions, from the capture alone: how acceptance depends on what came before."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, STATISTICAL, Suspect
from specscope.analyze.diagnose.rates import Rate, z_between
from specscope.trace.method import model_part
from specscope.trace.records import Preceded
from specscope.trace.wording import plural

SIGMAS = 5.0
DROP = 0.75  # of the acceptance elsewhere: text that gets harder takes less
GARBAGE = 0.5  # likewise, past the end of a table
EDGES = 24  # places at which a change with the context is looked for


def first_level(step: Step) -> float:
    """Whether the first drafted level was accepted, as the target sees it: the chance, where p and q tell it."""
    return float(len(step.verdict.path) > 0)


def after(case: Case) -> dict[Preceded, Rate]:
    """Acceptance of the first level by what came before."""
    table: dict[Preceded, Rate] = defaultdict(Rate)
    for step in case.drafting:
        if step.preceded is not None:
            table[step.preceded].add(step.request, first_level(step))
    return table


def drafter_kv_full(case: Case) -> Suspect | None:
    """After a full acceptance the last accepted token is one that the drafter never ran."""
    if not case.is_model:
        return None
    claims, full, example = 0, 0, None
    for step in case.drafting:
        if step.preceded is not Preceded.FULL or step.last is None or step.part.notes is None:
            continue
        full += 1
        most = _most_cached(step.last)
        if most is not None and step.part.notes.cached > most:
            claims += 1
            example = example or step.reference()
    table = after(case)
    partial = _joined(table, Preceded.PARTIAL, Preceded.NOTHING)
    z = z_between(partial, table[Preceded.FULL])
    said = []
    if claims > 0.5 * full and claims > 2:
        said.append(
            f"the drafter counts the last accepted token as cached, though no pass fed it, in {claims:,} of "
            f"{plural(full, 'step')} after a full acceptance"
        )
    if z > SIGMAS and table[Preceded.FULL].share < DROP * partial.share:
        said.append(f"first level accepted {table[Preceded.FULL]} after a full acceptance, {partial} after less")
        example = example or next(s.reference() for s in case.drafting if s.preceded is Preceded.FULL)
    if not said:
        return None
    score = CERTAIN if claims and z > SIGMAS else CERTAIN - 0.1 if claims else STATISTICAL + 0.1
    return Suspect(Cause.DRAFTER_KV_FULL, score, tuple(said), example=example)


def _most_cached(step: Step) -> int | None:
    """How many tokens a draft model's cache may hold after a step: its text, and the accepted nodes that were fed.

    None for drafters that keep other things, and where the passes' rows are not recorded.
    """
    notes = step.part.notes
    if notes is None or model_part(step.part.drafter) != "draft_model" or not len(notes.rows):
        return None
    inner = set(step.tree.parent.tolist())
    fed = sum(1 for node in step.verdict.path.tolist() if node in inner)
    return step.part.position + 1 + (fed if len(notes.rows) > 1 else 0)


def drafter_kv_preemption(case: Case) -> Suspect | None:
    """After a preemption the drafter's cache is empty, and what it drafts is as good as before."""
    if not case.is_model:
        return None
    claims, total, example = 0, 0, None
    since, before = Rate(), Rate()
    lost: set[str] = set()
    for step in case.drafting:
        is_first = step.preceded is Preceded.PREEMPTION
        if is_first:
            lost.add(step.request)
            total += 1
            if step.part.notes is not None and step.part.notes.cached > 0:
                claims += 1
                example = example or step.reference()
        (since if step.request in lost else before).add(step.request, first_level(step))
    z = z_between(before, since)
    said = []
    if claims > 0.5 * total and claims:
        said.append(f"the drafter counts tokens as cached right after a preemption in {claims:,} of {total:,} cases")
    if z > SIGMAS and since.share < DROP * before.share:
        said.append(f"first level accepted {since} after a preemption, {before} before any")
        example = example or next(s.reference() for s in case.drafting if s.preceded is Preceded.PREEMPTION)
    if not said:
        return None
    score = CERTAIN if claims and z > 2 else STATISTICAL + 0.1 if z > SIGMAS else STATISTICAL - 0.15
    return Suspect(Cause.DRAFTER_KV_PREEMPTION, score, tuple(said), example=example)


def drafter_rotary(case: Case) -> Suspect | None:
    """Acceptance that breaks off at some length of the context."""
    if not case.is_model:
        return None
    steps = case.drafting
    if len(steps) < 100:
        return None
    at = np.array([step.part.position for step in steps])
    best, said, example = 0.0, "", None
    for edge in np.unique(np.quantile(at, np.linspace(0.1, 0.9, EDGES)).astype(int)):
        below, beyond = Rate(), Rate()
        for step, position in zip(steps, at, strict=True):
            (below if position < edge else beyond).add(step.request, first_level(step))
        z = z_between(below, beyond)
        if z > best and beyond.share < GARBAGE * below.share:
            best = z
            said = f"first level accepted {below} in contexts below {edge:,} tokens, {beyond} beyond"
            example = next(step for step, p in zip(steps, at, strict=True) if p >= edge).reference()
    if best < SIGMAS + 2:
        return None
    return Suspect(Cause.DRAFTER_ROTARY, STATISTICAL, (said, f"{best:.0f} standard errors apart"), example=example)


def _joined(table: dict[Preceded, Rate], *kinds: Preceded) -> Rate:
    """Several as one."""
    both = Rate()
    for kind in kinds:
        for request, (hits, total) in table[kind].by_request.items():
            both.add(request, hits, total)
    return both
