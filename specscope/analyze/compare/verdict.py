"""The verdict in plain words: same, different or not known, the reasons, and the change that would have been seen.

The reasons are exactly what the tables mark: `! ` before a field or a cause, `*` after a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specscope.analyze.compare.bootstrap import FEWEST
from specscope.analyze.compare.config import explaining
from specscope.analyze.compare.failif import change, named
from specscope.analyze.compare.result import (
    ABOUT,
    EXACT,
    LOOPS,
    SUSPECT,
    WITHOUT_LOOPS,
    Difference,
    Estimate,
    Field,
    Pair,
    PartingCause,
    Sameness,
    StepStage,
)
from specscope.trace.history.conditions import TAU
from specscope.trace.history.wording import plural

RARE = 0.01  # of the pairs; up to that share may be rounding, which has no sharp bound
ENOUGH = 0.05  # of A's acceptance length: where so small a change would have been seen, no difference means the same
LOOPS_DIFFER = 0.05  # of the output: from there on a difference in loops is named
NAMED = 6  # kinds of evidence that a verdict names
STAGES = {
    PartingCause.TARGET: StepStage.TARGET,
    PartingCause.DRAFTER: StepStage.DRAFTER,
    PartingCause.COIN: StepStage.COINS,
    PartingCause.VERDICT: StepStage.VERDICT,
    PartingCause.PARAMETERS: StepStage.SAMPLING,
    PartingCause.RULE: StepStage.COINS,
}


@dataclass(frozen=True)
class ComparisonVerdict:
    """The answer, a sentence that states it, the reasons for it, and the acceptance length."""

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
    """The verdict on a comparison's pairs, fields, figures and groups."""
    tau = next((figure for figure in figures if figure.name == TAU), None)
    evidence = [*_evidence(fields), *_partings(pairs, differences)]
    reasons = [*evidence, *_figures(figures, groups)]
    loops = _loops(figures)  # before anything else is blamed
    if reasons:
        return ComparisonVerdict(Sameness.DIFFERENT, _different(tau, reasons), (*loops, *reasons), headline(tau))
    answer, summary, grounds = _without_reasons(pairs, fields, differences, tau)
    return ComparisonVerdict(answer, summary, (*loops, *grounds), headline(tau))


def _different(tau: Estimate | None, reasons: Sequence[str]) -> str:
    if tau is None or tau.difference is None or not tau.significant:
        return f"The runs differ, and nothing in the configuration explains it: {reasons[0]}."
    more = len(reasons) - 1
    beside = f" {plural(more, 'other difference')} {'is' if more == 1 else 'are'} listed below." if more else ""
    way = "fewer" if tau.difference < 0 else "more"
    return f"B gets {way} tokens out of a draft than A: {tau.b:.2f} instead of {tau.a:.2f}.{beside}"


def _without_reasons(
    pairs: Sequence[Pair], fields: Sequence[Field], differences: Sequence[Difference], tau: Estimate | None
) -> tuple[Sameness, str, list[str]]:
    configured = [*_configured(fields), *_asked(pairs, differences)]
    untold = [*_untold(pairs), *_unsure(fields)]
    if untold:
        return Sameness.UNKNOWN, f"It cannot be told whether the runs differ: {untold[0]}.", [*untold[1:], *configured]
    seen = _covered(fields, tau)
    if configured:
        why = ", ".join(dict.fromkeys(name for field in fields for name in field.explained))
        rest = f"nothing else differs beyond error in {seen}" if seen else "nothing else could be compared"
        summary = f"The runs differ only as configured{f' ({why})' if why else ''}."
        return Sameness.CONFIGURED, summary, [*configured, rest]
    if pairs and all(pair.same and pair.first is None for pair in pairs):
        of = "the pair of requests" if len(pairs) == 1 else f"all {len(pairs):,} pairs of requests"
        return Sameness.SAME, f"The runs are the same: {of} made exactly the same decisions.", []
    if tau is None or tau.a is None or tau.visible is None:
        return Sameness.UNKNOWN, f"It cannot be told whether the runs differ: {_too_little(tau)}.", []
    covered = [f"compared: {seen}"]
    if tau.visible <= ENOUGH * tau.a:
        return Sameness.SAME, "The runs do not differ beyond error.", covered
    unseen = f"a change of tau below {100 * tau.visible / tau.a:.1f} % would not have been seen"
    return Sameness.UNKNOWN, f"No difference is seen, but too little was recorded to rule one out: {unseen}.", covered


def accused(pairs: Sequence[Pair], differences: Iterable[Difference]) -> dict[PartingCause, list[Pair]]:
    """Pairs by each cause that nothing harmless explains, where there are more of them than rounding makes."""
    listed = tuple(differences)
    suspects = {}
    for cause in SUSPECT:
        mine = [pair for pair in pairs if cause in _causes(pair)]
        if mine and not _explained(cause, listed) and (cause in EXACT or len(mine) > RARE * len(pairs)):
            suspects[cause] = mine
    return suspects


def _explained(cause: PartingCause, differences: Iterable[Difference]) -> tuple[str, ...]:
    """What in the configuration explains a parting; what was asked for has its own settings alone."""
    if cause in SUSPECT:
        return explaining(STAGES[cause], differences, alike=True)
    return tuple(difference.name for difference in differences if difference.enters is STAGES[cause])


def _causes(pair: Pair) -> list[PartingCause]:
    """The causes of its first differing decision and of where its outputs part."""
    return [parting.cause for parting in (pair.first, pair.parting) if parting is not None]


def _evidence(fields: Iterable[Field]) -> list[str]:
    suspects = sorted((field for field in fields if field.suspect), key=lambda field: -field.share)
    return [
        f"{field.name} differs at {field.differ:,} of {field.compared:,} equal contexts"
        + ("" if field.largest is None else f", by up to {field.largest:.3g}")
        + (f" ({field.condition})" if field.condition else "")
        for field in suspects
    ]


def _partings(pairs: Sequence[Pair], differences: Iterable[Difference]) -> list[str]:
    lines = []
    for cause, mine in accused(pairs, differences).items():
        first = next(
            parting for parting in (mine[0].first, mine[0].parting) if parting is not None and parting.cause is cause
        )
        example = f"first {mine[0].id_a} at output token {first.position:,}"
        lines.append(f"{_parted(len(mine), len(pairs))}: {ABOUT[cause]}; {example}")
    return lines


def _parted(count: int, of: int) -> str:
    return f"{count:,} of {plural(of, 'pair')} {'parts' if count == 1 else 'part'}"


def _loops(figures: Sequence[Estimate]) -> list[str]:
    """A difference in how much of the output lies in loops, with the acceptance length without these."""
    known = {figure.name: figure for figure in figures}
    loops, without = known.get(LOOPS), known.get(WITHOUT_LOOPS)
    if loops is None or abs(loops.difference or 0.0) < LOOPS_DIFFER:
        return []
    left = f"; {WITHOUT_LOOPS} {change(without)}" if without is not None else ""
    return [f"{LOOPS} {change(loops)}: acceptance on text that loops says little of the drafter{left}"]


def _figures(figures: Sequence[Estimate], groups: Mapping[str, Sequence[Estimate]]) -> list[str]:
    lines = [f"{figure.name} {change(figure)}" for figure in figures if figure.significant]
    tau = any(figure.significant for figure in figures if figure.name == TAU)
    for title, each in () if tau else groups.items():  # then every group differs
        lines += [f"{named(title, figure)} {change(figure)}" for figure in each if figure.significant]
    return lines


def _configured(fields: Iterable[Field]) -> list[str]:
    return [
        f"{field.name} differs at {field.differ:,} of {field.compared:,} equal contexts, "
        f"as configured: {', '.join(field.explained)}"
        for field in fields
        if field.explained
    ]


def _asked(pairs: Sequence[Pair], differences: Sequence[Difference]) -> list[str]:
    """Partings that the configuration explains."""
    lines = []
    for cause in (*SUSPECT, PartingCause.PARAMETERS, PartingCause.RULE):
        mine = [pair for pair in pairs if cause in _causes(pair)]
        names = _explained(cause, differences)
        if mine and names:
            lines.append(f"{_parted(len(mine), len(pairs))}: {ABOUT[cause]}, as configured: {', '.join(names)}")
    return lines


def _untold(pairs: Sequence[Pair]) -> list[str]:
    lines = []
    for cause in (PartingCause.CHOICE, PartingCause.UNKNOWN):
        mine = [pair for pair in pairs if cause in _causes(pair)]
        lines += [f"{_parted(len(mine), len(pairs))}: {ABOUT[cause]}"] if mine else []
    return lines


def _unsure(fields: Iterable[Field]) -> list[str]:
    return [
        f"{field.name} differs at {field.differ:,} of {field.compared:,} equal contexts, {field.note}"
        for field in fields
        if field.unsure
    ]


def _covered(fields: Iterable[Field], tau: Estimate | None) -> str:
    """What was judged and does not differ, with its n and unit; "" where nothing was."""
    judged = [field for field in fields if field.judged and field.compared and not field.explained]
    names = [f"{field.name} at {field.compared:,}" for field in judged[:NAMED]]
    names += [f"{len(judged) - NAMED} more"] if len(judged) > NAMED else []
    acceptance = [] if tau is None or not tau.clusters else [f"acceptance over {plural(tau.clusters, 'request')}"]
    contexts = [f"{', '.join(names)} equal contexts"] if names else []
    return " and ".join([*acceptance, *contexts])


def headline(tau: Estimate | None) -> str:
    """`tau 2.42 → 2.32, -4.3 % (95 %: -6.9 to -1.6 %) over 24 requests`, and whether a change is shown."""
    if tau is None or tau.a is None or tau.b is None or tau.difference is None:
        return "tau is not known on both sides"
    both = f"{TAU} {tau.a:.2f} → {tau.b:.2f}, {100 * tau.difference / tau.a:+.1f} %"
    if tau.low is None or tau.high is None or tau.visible is None:
        return f"{both}; {_too_little(tau)}"
    low, high, seen = (100 * value / tau.a for value in (tau.low, tau.high, tau.visible))
    text = f"{both} (95 %: {low:+.1f} to {high:+.1f} %) over {plural(tau.clusters, 'request')}"
    return text if tau.significant else f"{text}: no change is shown, {seen:.1f} % or more would have been seen"


def _too_little(tau: Estimate | None) -> str:
    if tau is None or tau.difference is None:
        return "there are no drafts on one side or both"
    return (
        f"{plural(tau.clusters, 'request')} with drafts on both sides are too few for an interval ({FEWEST} at least)"
    )


def exit_code(answer: Sameness, conditions: Sequence[object], hit: bool) -> int:
    """0 where nothing differs beyond error or as configured, 1 where something else does; --fail-if alone decides."""
    return int(hit) if conditions else int(answer is Sameness.DIFFERENT)
