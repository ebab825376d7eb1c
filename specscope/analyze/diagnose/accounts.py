"""What lies behind failed checks from step to step: lost tokens, KV that is not moved, blocks of two requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import LOG_CHANCE, Proof, Suspect
from specscope.analyze.diagnose.verdicts import counted
from specscope.analyze.evidence.visits import Visit
from specscope.analyze.findings import Finding
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RequestStep

CACHED = "tokens in the cache"


def token_lost(case: Case, check: Finding) -> list[Suspect]:
    """Steps that do not begin where the one before ended: by how much, and after what."""
    wrong = [case.visits[place] for place in check.wrong.tolist()]
    cached = case.checks.get(CACHED)
    longer = [] if cached is None else [_keeps_rejected(case.visits[place]) for place in cached.wrong.tolist()]
    if check.name == "positions" and longer and all(longer):
        return []  # a cache that is too long puts the root too far: said of the cache
    if check.name == CACHED and all(longer):
        lengths = Counter(map(_gap, wrong))
        text = ", ".join(f"{size:+d} ({count:,})" for size, count in lengths.most_common(3))
        line = f"the cache is too long behind a rejection in {counted(check)}, by no more than was rejected: {text}"
        return [Suspect(Cause.TARGET_KV, Proof.ROWS, (line,), example=check.example)]
    if line := _of_anothers_count(case, wrong):
        also = (f"{check.name}: {check.detail}, and so in {counted(check)}", line)
        return [Suspect(Cause.ROWS_SWAPPED, Proof.ROWS, also, example=check.example)]
    gaps = Counter[tuple[str, int]]()
    for visit in wrong:
        gaps[_when(visit), _gap(visit)] += 1
    kinds = Counter[str]()
    for (kind, _), count in gaps.items():
        kinds[kind] += count
    lines = [f"{check.name}: {check.detail}, and so in {counted(check)}"]
    for kind, count in kinds.most_common():
        sizes = [(size, n) for (name, size), n in gaps.most_common() if name == kind and size]
        if sizes:
            text = ", ".join(f"{size:+d} ({n:,})" for size, n in sizes[:3])
            lines.append(f"{plural(count, 'gap')} {kind}: {text}")
    # Where most positions are wrong, no tokens are lost: positions are recorded wrongly
    positions = check.failed > 0.5 * check.tested and check.tested > 4
    return [
        Suspect(Cause.TOKEN_LOST, Proof.CONDITION if positions else Proof.ROWS, tuple(lines), example=check.example)
    ]


def _of_anothers_count(case: Case, wrong: Sequence[Visit]) -> str:
    """Whether each step begins where another request's count of accepted tokens would have ended it; "" where not.

    How often chance does this is read from the counts that the step before could have had.
    """
    at = {(visit.request.id, visit.part.index): visit for visit in case.visits}
    log_chance, gaps = 0.0, 0
    for visit in wrong:
        before = visit.before
        if before is None or before.verdict is None or visit.preempted or not (gap := _gap(visit)):
            return ""
        batch = at[visit.request.id, before.index].record.requests
        own = before.verdict.accepted
        others = {part.verdict.accepted for part in batch if part.verdict is not None} - {own}
        if own + gap not in others:
            return ""
        gaps, log_chance = gaps + 1, log_chance + math.log(len(others) / max(before.tree.max_depth, len(others), 1))
    if log_chance > LOG_CHANCE:
        return ""
    return f"each of {plural(gaps, 'gap')} is the count of another request of the same batch, less the request's own"


def _when(visit: Visit) -> str:
    if visit.preempted:
        return "after a preemption"
    chunk = visit.before is not None and visit.before.verdict is None
    return "at the border of prefill chunks" if chunk else "between steps"


def _gap(visit: Visit) -> int:
    """By how many tokens the step begins too late; 0 where that is not known."""
    if visit.before is None:
        return 0
    due = visit.part.found if visit.preempted else visit.before.context_len + _added_kv(visit.before)
    return visit.part.context_len - due


def _keeps_rejected(visit: Visit) -> bool:
    """Whether the step begins with more in the cache than was due, and rejected drafts of the one before can be it."""
    before = visit.before
    if before is None or before.verdict is None or visit.preempted:
        return False
    return 0 < _gap(visit) <= len(before.tree) - before.verdict.accepted


def _added_kv(part: RequestStep) -> int:
    """How many tokens' KV a step added: what it fed, the root, and the accepted path."""
    return part.prefill_tokens + (0 if part.verdict is None else 1 + len(part.verdict.path))


def outputs(case: Case, check: Finding) -> list[Suspect]:
    """Outputs that are not what the steps emitted: another request's, or with tokens missing."""
    made = {name: [token for token, _ in request.output()] for name, request in case.history.requests.items()}
    swapped = 0
    for place in check.wrong.tolist():
        request = case.visits[place].request
        output = [] if request.end is None else request.end.output.tolist()
        swapped += any(output == text for name, text in made.items() if name != request.id)
    lines = [f"{check.name}: {check.detail}, and so in {counted(check)}"]
    if swapped:
        lines.append(f"it is what another request's steps emitted in {swapped:,} of these")
        return [Suspect(Cause.ROWS_SWAPPED, Proof.ROWS, tuple(lines), example=check.example, explained=swapped)]
    return [Suspect(Cause.TOKEN_LOST, Proof.ROWS, tuple(lines), example=check.example)]


def ends(case: Case, check: Finding) -> list[Suspect]:
    """Output that goes on past what ends it. One that ends too soon has no cause of its own."""
    if "after" in check.detail or "went on" in check.detail:
        line = f"{check.detail}, and so in {counted(check)}"
        return [Suspect(Cause.PAST_THE_END, Proof.ROWS, (line,), example=check.example)]
    return []


def not_moved(case: Case, check: Finding) -> list[Suspect]:
    """Accepted nodes whose KV stays where it lay."""
    line = f"{check.detail}, and so in {counted(check)}"
    return [Suspect(Cause.TARGET_KV, Proof.ROWS, (line,), example=check.example)]


def blocks(case: Case, check: Finding) -> list[Suspect]:
    """KV blocks that two requests write to, or that change under a request's tokens."""
    line = f"{check.name}: {check.detail}, and so in {counted(check)}"
    few = check.failed <= 0.02 * len(case.visits)  # wrongly recorded positions also give so few
    return [Suspect(Cause.BLOCKS_SHARED, Proof.CONDITION if few else Proof.ROWS, (line,), example=check.example)]
