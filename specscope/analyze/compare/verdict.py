"""The plain verdict: same, different or not to be told, what speaks for it, and the size that would have been seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specscope.analyze.compare.failif import change
from specscope.analyze.compare.result import ABOUT, SUSPECT, Answer, Cause, Estimate, Field, Pair
from specscope.trace.wording import plural

RARE = 0.01  # of the pairs: rounding has no sharp bound
ENOUGH = 0.05  # of A's acceptance length: where a smaller change would have been seen, no difference means the same


def verdict(
    pairs: Sequence[Pair],
    fields: Iterable[Field],
    figures: Sequence[Estimate],
    groups: Mapping[str, Sequence[Estimate]],
) -> tuple[Answer, str, list[str]]:
    """(the answer, in a sentence, what speaks for it)."""
    reasons = [*_evidence(fields), *_partings(pairs), *_figures(figures, groups)]
    tau = next((one for one in figures if one.name == "tau"), None)
    if reasons:
        return Answer.DIFFERENT, _different(tau), reasons
    if pairs and all(pair.same and pair.first is None for pair in pairs):
        return Answer.SAME, f"the same: {plural(len(pairs), 'pair')} made exactly the same decisions", []
    seen = _visible(tau)
    untold = [pair for pair in pairs if _cause(pair) in (Cause.CHOICE, Cause.UNKNOWN)]
    if untold:
        cause = ABOUT[Cause.CHOICE if any(_cause(pair) is Cause.CHOICE for pair in untold) else Cause.UNKNOWN]
        return Answer.UNKNOWN, f"cannot be told: {_parted(len(untold), len(pairs))}: {cause}", []
    if tau is None or tau.a is None or tau.visible is None:
        return Answer.UNKNOWN, f"cannot be told: {_too_little(tau)}", []
    if tau.visible <= ENOUGH * tau.a:
        return Answer.SAME, f"no difference beyond error; {seen}", []
    return Answer.UNKNOWN, f"cannot be told: no difference beyond error, but only {seen}", []


def _cause(pair: Pair) -> Cause | None:
    return None if pair.parting is None else pair.parting.cause


def _evidence(fields: Iterable[Field]) -> list[str]:
    found = sorted((one for one in fields if one.suspect), key=lambda one: -one.share)
    return [
        f"{one.name} differs at {one.differ:,} of {one.compared:,} equal contexts"
        + ("" if one.largest is None else f", by up to {one.largest:.3g}")
        + (f" ({one.condition})" if one.condition else "")
        for one in found
    ]


def _partings(pairs: Sequence[Pair]) -> list[str]:
    found = []
    for cause in SUSPECT:
        mine = [one for one in pairs if one.parting is not None and one.parting.cause is cause]
        if len(mine) > RARE * len(pairs):
            first = mine[0]
            where = "" if first.parting is None else f"; first {first.id_a} at output token {first.parting.position:,}"
            found.append(f"{_parted(len(mine), len(pairs))}: {ABOUT[cause]}{where}")
    return found


def _parted(count: int, of: int) -> str:
    return f"{count:,} of {plural(of, 'pair')} {'parts' if count == 1 else 'part'}"


def _figures(figures: Sequence[Estimate], groups: Mapping[str, Sequence[Estimate]]) -> list[str]:
    found = [f"{one.name} {change(one)}" for one in figures if one.significant]
    for title, each in () if _tau_differs(figures) else groups.items():  # then every group differs
        found += [f"tau where {title} is {one.name}: {change(one)}" for one in each if one.significant]
    return found


def _tau_differs(figures: Sequence[Estimate]) -> bool:
    return any(one.significant for one in figures if one.name == "tau")


def _different(tau: Estimate | None) -> str:
    if tau is None or tau.difference is None:
        return "different"
    if tau.significant:
        way = "lower" if tau.difference < 0 else "higher"
        share = "" if not tau.a else f", {100 * tau.difference / tau.a:+.1f} %"
        return f"different: acceptance length is {way} in B{share}"
    size = (
        "" if tau.visible is None or not tau.a else f" ({100 * tau.visible / tau.a:.1f} % or more would have been seen)"
    )
    return f"different; no change of the acceptance length is shown{size}"


def _visible(tau: Estimate | None) -> str:
    if tau is None or tau.visible is None or not tau.a:
        return "no interval"
    return f"a change in acceptance length of {100 * tau.visible / tau.a:.1f} % or more would have been seen"


def _too_little(tau: Estimate | None) -> str:
    if tau is None or tau.difference is None:
        return "one side has no drafts"
    return f"{plural(tau.clusters, 'request')} with drafts on both sides are too few for an interval"


def exit_code(answer: Answer, conditions: Sequence[object], hit: bool) -> int:
    """0 where nothing differs beyond error, 1 where something does; with --fail-if that alone decides."""
    return int(hit) if conditions else int(answer is Answer.DIFFERENT)
