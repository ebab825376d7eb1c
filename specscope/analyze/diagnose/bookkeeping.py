"""Causes in the bookkeeping: tokens, counts, verdicts and KV blocks that go astray."""

from __future__ import annotations

from collections import Counter

import numpy as np

from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, CONDITION, STATISTICAL, Suspect
from specscope.analyze.findings import Reference
from specscope.analyze.walk import Visit
from specscope.trace.records import FinishReason, Outcome
from specscope.trace.wording import plural


def counts_swapped(case: Case) -> Suspect | None:
    """Accepted paths that are not the accepted nodes, but as long as another request's in the same batch."""
    judged: dict[int, list[Step]] = {}
    for step in case.drafting:
        judged.setdefault(step.visit.record.step, []).append(step)
    wrong, others, alone, example = 0, 0, 0, None
    for batch in judged.values():
        own = [int((step.verdict.outcome == Outcome.ACCEPTED).sum()) for step in batch]
        for i, step in enumerate(batch):
            counts = _counts(step)
            if all(count == own[i] for count in counts):
                continue
            wrong += 1
            alone += len(batch) == 1
            others += any(counts[-1] == own[j] for j in range(len(batch)) if j != i)
            example = example or step.reference()
    if wrong <= 2:
        return None
    total = plural(len(case.drafting), "step")
    said = [f"the committed path is not as long as what was accepted in {wrong:,} of {total}"]
    said.append(f"it is as long as another request's of the same batch in {others:,} of these")
    score = CERTAIN if others > 0.8 * wrong and not alone else CONDITION * others / wrong
    against = (f"it happens to requests alone in the batch too, {alone:,} times",) if alone else ()
    return Suspect(Cause.COUNTS_SWAPPED, score, tuple(said), against, example)


def _counts(step: Step) -> tuple[int, ...]:
    """How many accepted tokens the path has, and the output, where nothing ended it."""
    end = step.visit.request.end
    is_last = end is not None and step.visit.request.steps[-1] is step.part
    path = len(step.verdict.path)
    return (path,) if is_last else (path, step.part.emitted - 1)


def verdict_late(case: Case) -> Suspect | None:
    """Verdicts whose numbers are those of the request's step before."""
    same, total, example = 0, 0, None
    for step in case.drafting:
        before = step.last
        if before is None or len(before.tree) != len(step.tree) or len(step.tree) < 2:
            continue
        total += 1
        old, new = before.verdict, step.verdict
        alike = np.array_equal(old.coin, new.coin) and np.array_equal(old.p, new.p)
        if alike and (old.final_coin, old.token) == (new.final_coin, new.token):
            same += 1
            example = example or step.reference()
    if same <= max(2, 0.05 * total):
        return None
    said = f"the verdict is the request's last one, number by number, in {same:,} of {plural(total, 'step')}"
    return Suspect(Cause.VERDICT_LATE, CONDITION, (said,), example=example)


def token_lost(case: Case) -> Suspect | None:
    """Positions and output that do not go on where the step before ended."""
    gaps: list[tuple[str, Visit, int]] = []
    misplaced = 0  # of them, roots that do not follow the last committed token
    root: dict[str, int] = {}  # where each request's next root is
    for visit in case.visits:
        part, before, name = visit.part, visit.before, visit.request.id
        if before is not None:
            went_on = part.found if visit.preempted else before.context_len + _kept(before)
            if part.context_len != went_on:
                kind = "after a preemption" if visit.preempted else "between steps"
                if before.verdict is None and not visit.preempted:
                    kind = "at the border of prefill chunks"
                gaps.append((kind, visit, part.context_len - went_on))
        if part.verdict is None:
            continue
        info = visit.request.info
        expected = root.get(name, None if info is None else len(info.prompt_tokens) - 1)
        if expected is not None and part.position != expected:
            gaps.append((_when(visit), visit, part.position - expected))
            misplaced += 1
        root[name] = part.position + part.emitted
    short = _short_outputs(case)
    if not gaps and not short:
        return None
    kinds = Counter(kind for kind, _, _ in gaps)
    said = [f"{plural(count, 'gap')} {kind}: {_sizes(gaps, kind)}" for kind, count in kinds.most_common()]
    if short:
        said.append(f"{plural(len(short), 'output')} not what the steps emitted: {short[0]} for one")
    example = gaps[0][1].reference() if gaps else None
    steps = len(case.visits)
    if gaps and not misplaced:
        said.append("every root follows the last committed token: tokens are computed twice, or left out of the KV")
    always = misplaced > 0.5 * steps  # then it is not where tokens are lost, but how positions are told
    return Suspect(Cause.TOKEN_LOST, CONDITION if always else CERTAIN + 0.01, tuple(said), example=example)


def _kept(part: object) -> int:
    """How many tokens' KV a step added: what it fed, the root, and the accepted path."""
    from specscope.trace.records import RequestStep

    assert isinstance(part, RequestStep)
    return part.prefill_tokens + (0 if part.verdict is None else 1 + len(part.verdict.path))


def _when(visit: Visit) -> str:
    if visit.preempted:
        return "after a preemption"
    return "at the border of prefill chunks" if visit.part.prefill_tokens and visit.before else "between steps"


def _sizes(gaps: list[tuple[str, Visit, int]], kind: str) -> str:
    sizes = Counter(size for name, _, size in gaps if name == kind)
    return ", ".join(f"{size:+d} ({count:,})" for size, count in sizes.most_common(3))


def _short_outputs(case: Case) -> list[str]:
    """Requests whose output is not what their steps emitted."""
    odd = []
    for request in case.history.requests.values():
        if request.end is None or not request.steps or request.steps[0].index != 0:
            continue
        emitted = [token for token, _ in request.output()]
        if request.end.reason is not FinishReason.ERROR and emitted != request.end.output.tolist():
            odd.append(f"{request.id} has {len(request.end.output):,} tokens, its steps emitted {len(emitted):,}")
    return odd


def blocks_shared(case: Case) -> Suspect | None:
    """KV blocks that two running requests write to, or that one writes while another's tokens lie there."""
    owner: dict[int, str] = {}  # of each block that holds committed tokens
    size = 16 if case.history.run is None else case.history.run.block_size
    clashes: list[tuple[Visit, int, str]] = []
    held: dict[str, dict[int, int]] = {}  # each request's blocks by their place in its table
    moved = 0
    for record in case.history.steps:
        for name in record.preempted:
            _free(owner, held, name)
        for row, part in enumerate(record.requests):
            if not len(part.blocks):
                continue
            first = part.context_len // size
            mine = held.setdefault(part.request, {})
            end = part.context_len + _kept(part)
            for place, block in enumerate(part.blocks.tolist(), first):
                other = owner.get(block)
                if other is not None and other != part.request:
                    request = case.history.requests[part.request]
                    clashes.append((Visit(request, record, part, row, None, False), block, other))
                if place in mine and mine[place] != block and place * size < part.context_len:
                    moved += 1
                if place * size < end:
                    owner[block] = part.request
                    mine[place] = block
        for done in record.finished:
            _free(owner, held, done.info.id)
    if not clashes and moved < 1:
        return None
    said = []
    example: Reference | None = None
    if clashes:
        visit, block, other = clashes[0]
        said.append(
            f"{plural(len(clashes), 'step')} wrote to a block that held another running request's tokens: "
            f"block {block} of {visit.request.id} was {other}'s"
        )
        example = visit.reference()
    if moved:
        said.append(f"{plural(moved, 'block')} of a running request changed under its tokens")
    few = len(clashes) + moved <= 0.02 * len(case.visits)  # what positions that are told wrongly also give
    return Suspect(Cause.BLOCKS_SHARED, CERTAIN - 0.1 if few else CERTAIN + 0.02, tuple(said), example=example)


def _free(owner: dict[int, str], held: dict[str, dict[int, int]], name: str) -> None:
    for block in held.pop(name, {}).values():
        if owner.get(block) == name:
            del owner[block]


def kv_decay(case: Case) -> Suspect | None:
    """Acceptance that falls from early requests to late ones, for no reason in the text."""
    from specscope.analyze.diagnose.rates import Rate, z_between

    names = list(dict.fromkeys(step.request for step in case.drafting))
    if len(names) < 12:
        return None
    best, said, example = 0.0, "", None
    for cut in range(len(names) // 4, 3 * len(names) // 4 + 1):
        early, late, old = Rate(), Rate(), set(names[:cut])
        for step in case.drafting:
            rate = early if step.request in old else late
            rate.add(step.request, len(step.verdict.path), max(step.tree.max_depth, 1))
        z = z_between(early, late)
        if z > best and late.share < 0.6 * early.share:
            best, example = z, next(step for step in case.drafting if step.request not in old).reference()
            said = f"of the drafts' depth {early} was accepted in the first {cut} requests, {late} in the others"
    if best < 7:
        return None
    return Suspect(Cause.KV_DECAY, STATISTICAL, (said, f"{best:.0f} standard errors apart"), example=example)
