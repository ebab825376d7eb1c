"""The plain verdict: same, different or not to be told, what speaks for it, and the size that would have been seen.

Everything that a table marks is a reason here, and what no table marks is none: `! ` before a field or a cause, `*`
behind a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specscope.analyze.compare.bootstrap import FEWEST
from specscope.analyze.compare.explained import of_cause
from specscope.analyze.compare.failif import change, named
from specscope.analyze.compare.result import (
    ABOUT,
    EXACT,
    LOOPS,
    SUSPECT,
    TAU,
    WITHOUT_LOOPS,
    Difference,
    Estimate,
    Field,
    Pair,
    PartingCause,
    Sameness,
)
from specscope.trace.history.wording import plural

RARE = 0.01  # of the pairs: rounding has no sharp bound
ENOUGH = 0.05  # of A's acceptance length: where a smaller change would have been seen, no difference means the same
LOOPS_DIFFER = 0.05  # of the output: from there on a difference in loops is named
NAMED = 6  # kinds of evidence that a verdict names


@dataclass(frozen=True)
class ComparisonVerdict:
    """The answer, in a sentence, what speaks for it, and the acceptance length."""

    answer: Sameness
    summary: str
    reasons: tuple[str, ...]
    headline: str


def verdict(
    pairs: Sequence[Pair],
    fields: Sequence[Field],
    figures: Sequence[Estimate],
    groups: Mapping[str, Sequence[Estimate]],
    differences: Sequence[Difference],
) -> ComparisonVerdict:
    """All of it."""
    tau = next((one for one in figures if one.name == TAU), None)
    reasons = [*_evidence(fields), *_partings(pairs, differences), *_figures(figures, groups)]
    loops = _loops(figures)  # before anything else is blamed
    if reasons:
        return ComparisonVerdict(Sameness.DIFFERENT, _different(tau), (*loops, *reasons), headline(tau))
    answer, summary, told = _without_reasons(pairs, fields, differences, tau)
    return ComparisonVerdict(answer, summary, (*loops, *told), headline(tau))


def _without_reasons(
    pairs: Sequence[Pair], fields: Sequence[Field], differences: Sequence[Difference], tau: Estimate | None
) -> tuple[Sameness, str, list[str]]:
    configured = [*_configured(fields), *_asked(pairs, differences)]
    untold = [*_untold(pairs), *_unsure(fields)]
    if untold:
        return Sameness.UNKNOWN, f"cannot be told: {untold[0]}", [*untold[1:], *configured]
    if configured:
        rest = "nothing else differs beyond error in"
        return Sameness.CONFIGURED, f"different as configured; {rest} {_covered(fields, tau)}", configured
    if pairs and all(pair.same and pair.first is None for pair in pairs):
        return Sameness.SAME, f"the same: {plural(len(pairs), 'pair')} made exactly the same decisions", []
    if tau is None or tau.a is None or tau.visible is None:
        return Sameness.UNKNOWN, f"cannot be told: {_too_little(tau)}", []
    if tau.visible <= ENOUGH * tau.a:
        return Sameness.SAME, f"no difference beyond error in {_covered(fields, tau)}", []
    unseen = f"a change of tau below {100 * tau.visible / tau.a:.1f} % would not have been seen"
    return Sameness.UNKNOWN, f"cannot be told: no difference beyond error in {_covered(fields, tau)}; {unseen}", []


def accused(pairs: Sequence[Pair], differences: Iterable[Difference]) -> dict[PartingCause, list[Pair]]:
    """Pairs by a cause that nothing harmless explains, where there are more of them than rounding makes."""
    told = tuple(differences)
    found = {}
    for cause in SUSPECT:
        mine = [pair for pair in pairs if cause in _causes(pair)]
        if mine and not of_cause(cause, told) and (cause in EXACT or len(mine) > RARE * len(pairs)):
            found[cause] = mine
    return found


def _causes(pair: Pair) -> list[PartingCause]:
    """Of its first other decision, and of where its outputs part."""
    return [parting.cause for parting in (pair.first, pair.parting) if parting is not None]


def _evidence(fields: Iterable[Field]) -> list[str]:
    found = sorted((one for one in fields if one.suspect), key=lambda one: -one.share)
    return [
        f"{one.name} differs at {one.differ:,} of {one.compared:,} equal contexts"
        + ("" if one.largest is None else f", by up to {one.largest:.3g}")
        + (f" ({one.condition})" if one.condition else "")
        for one in found
    ]


def _partings(pairs: Sequence[Pair], differences: Iterable[Difference]) -> list[str]:
    found = []
    for cause, mine in accused(pairs, differences).items():
        first = next(one for one in (mine[0].first, mine[0].parting) if one is not None and one.cause is cause)
        at = f"first {mine[0].id_a} at output token {first.position:,}"
        found.append(f"{_parted(len(mine), len(pairs))}: {ABOUT[cause]}; {at}")
    return found


def _parted(count: int, of: int) -> str:
    return f"{count:,} of {plural(of, 'pair')} {'parts' if count == 1 else 'part'}"


def _loops(figures: Sequence[Estimate]) -> list[str]:
    """A difference in how much of the output lies in loops, with the acceptance length that is left without."""
    known = {one.name: one for one in figures}
    loops, without = known.get(LOOPS), known.get(WITHOUT_LOOPS)
    if loops is None or abs(loops.difference or 0.0) < LOOPS_DIFFER:
        return []
    left = f"; {WITHOUT_LOOPS} {change(without)}" if without is not None else ""
    return [f"{LOOPS} {change(loops)}: acceptance on text that loops says little of the drafter{left}"]


def _figures(figures: Sequence[Estimate], groups: Mapping[str, Sequence[Estimate]]) -> list[str]:
    found = [f"{one.name} {change(one)}" for one in figures if one.significant]
    tau = any(one.significant for one in figures if one.name == TAU)
    for title, each in () if tau else groups.items():  # then every group differs
        found += [f"{named(title, one)} {change(one)}" for one in each if one.significant]
    return found


def _configured(fields: Iterable[Field]) -> list[str]:
    return [
        f"{one.name} differs at {one.differ:,} of {one.compared:,} equal contexts, "
        f"as configured: {', '.join(one.explained)}"
        for one in fields
        if one.explained
    ]


def _asked(pairs: Sequence[Pair], differences: Sequence[Difference]) -> list[str]:
    """Partings that the configuration explains."""
    found = []
    for cause in (*SUSPECT, PartingCause.PARAMETERS, PartingCause.RULE):
        mine = [pair for pair in pairs if cause in _causes(pair)]
        names = of_cause(cause, differences)
        if mine and names:
            found.append(f"{_parted(len(mine), len(pairs))}: {ABOUT[cause]}, as configured: {', '.join(names)}")
    return found


def _untold(pairs: Sequence[Pair]) -> list[str]:
    found = []
    for cause in (PartingCause.CHOICE, PartingCause.UNKNOWN):
        mine = [pair for pair in pairs if cause in _causes(pair)]
        found += [f"{_parted(len(mine), len(pairs))}: {ABOUT[cause]}"] if mine else []
    return found


def _unsure(fields: Iterable[Field]) -> list[str]:
    return [
        f"{one.name} differs at {one.differ:,} of {one.compared:,} equal contexts, {one.note}"
        for one in fields
        if one.unsure
    ]


def _covered(fields: Iterable[Field], tau: Estimate | None) -> str:
    """What was judged and does not differ, with its n and unit."""
    judged = [one for one in fields if one.judged and one.compared and not one.explained]
    names = [f"{one.name} at {one.compared:,}" for one in judged[:NAMED]]
    names += [f"{len(judged) - NAMED} more"] if len(judged) > NAMED else []
    acceptance = [] if tau is None else [f"acceptance over {plural(tau.clusters, 'request')}"]
    contexts = f"{', '.join(names)} equal contexts" if names else "nothing at equal contexts"
    return " and ".join([*acceptance, contexts])


def _different(tau: Estimate | None) -> str:
    if tau is None or tau.difference is None or not tau.significant:
        return "different"
    return f"different: acceptance length is {'lower' if tau.difference < 0 else 'higher'} in B"


def headline(tau: Estimate | None) -> str:
    """`tau 2.42 → 2.32, -4.3 % (95 %: -6.9 to -1.6 %) over 24 requests`, and what is known of it."""
    if tau is None or tau.a is None or tau.b is None or tau.difference is None:
        return "tau is not known on both sides"
    both = f"{TAU} {tau.a:.2f} → {tau.b:.2f}, {100 * tau.difference / tau.a:+.1f} %"
    if tau.low is None or tau.high is None or tau.visible is None:
        return f"{both}; {_too_little(tau)}"
    low, high, seen = (100 * value / tau.a for value in (tau.low, tau.high, tau.visible))
    told = f"{both} (95 %: {low:+.1f} to {high:+.1f} %) over {plural(tau.clusters, 'request')}"
    return told if tau.significant else f"{told}: no change is shown, {seen:.1f} % or more would have been seen"


def _too_little(tau: Estimate | None) -> str:
    if tau is None or tau.difference is None:
        return "one side has no drafts"
    return (
        f"{plural(tau.clusters, 'request')} with drafts on both sides are too few for an interval ({FEWEST} at least)"
    )


def exit_code(answer: Sameness, conditions: Sequence[object], hit: bool) -> int:
    """0 where nothing differs beyond error or as configured, 1 where something else does; --fail-if alone decides."""
    return int(hit) if conditions else int(answer is Sameness.DIFFERENT)
