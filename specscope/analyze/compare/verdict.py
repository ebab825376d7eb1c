"""The verdict in plain words: same, different or not known, the reasons, and the change that would have been seen.

The reasons are exactly what the tables mark: `! ` before a field or a cause, `*` after a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from specscope.analyze.compare.bootstrap import FEWEST, Estimate
from specscope.analyze.compare.config import Difference, explaining
from specscope.analyze.compare.failif import named
from specscope.analyze.compare.fields import Field
from specscope.analyze.compare.figures import LOOPS, WITHOUT_LOOPS
from specscope.analyze.compare.parting import PartingCause
from specscope.analyze.compare.result import Comparison, Pair, Sameness
from specscope.trace.history.conditions import TAU
from specscope.trace.history.wording import plural

RARE = 0.01  # of the pairs; up to that share may be rounding, which has no sharp bound
ENOUGH = 0.05  # of A's acceptance length: where so small a change would have been seen, no difference means the same
LOOPS_DIFFER = 0.05  # of the output: from there on a difference in loops is named
NAMED = 6  # kinds of evidence that a verdict names


def judged(found: Comparison) -> Comparison:
    """A comparison with its verdict: the answer, a sentence that states it, the reasons, and the acceptance length."""
    reasons = [*_evidence(found.fields), *_partings(found), *_figures(found)]
    if reasons:
        answer, summary = Sameness.DIFFERENT, _different(found.tau, reasons)
    else:
        answer, summary, reasons = _without_reasons(found)
    told = (*_loops(found.figures), *reasons)  # loops before anything else is blamed
    return replace(found, answer=answer, summary=summary, reasons=told, headline=headline(found.tau))


def _different(tau: Estimate | None, reasons: Sequence[str]) -> str:
    if tau is None or tau.difference is None or not tau.significant:
        return f"The runs differ, and nothing in the configuration explains it: {reasons[0]}."
    more = len(reasons) - 1
    beside = f" {plural(more, 'other difference')} {'is' if more == 1 else 'are'} listed below." if more else ""
    way = "fewer" if tau.difference < 0 else "more"
    return f"B gets {way} tokens out of a draft than A: {tau.b:.2f} instead of {tau.a:.2f}.{beside}"


def _without_reasons(found: Comparison) -> tuple[Sameness, str, list[str]]:
    pairs, fields, tau, seen = found.pairs, found.fields, found.tau, _covered(found)
    configured = [
        f"{field.sentence}, as configured: {', '.join(field.explained)}" for field in fields if field.explained
    ]
    causes = sorted((cause for cause in PartingCause if cause.stage), key=lambda cause: not cause.suspect)
    asked = [(_parted(pairs, cause), _explained(cause, found.differences)) for cause in causes]
    configured += [f"{parted}, as configured: {', '.join(names)}" for parted, names in asked if parted and names]
    untold = [parted for cause in (PartingCause.CHOICE, PartingCause.UNKNOWN) if (parted := _parted(pairs, cause))]
    untold += [f"{field.sentence}, {field.note}" for field in fields if field.unsure]
    if untold:
        return Sameness.UNKNOWN, f"It cannot be told whether the runs differ: {untold[0]}.", [*untold[1:], *configured]
    if configured:
        why = ", ".join(dict.fromkeys(name for field in fields for name in field.explained))
        rest = f"nothing else differs beyond error in {seen}" if seen else "nothing else could be compared"
        summary = f"The runs differ only as configured{f' ({why})' if why else ''}."
        return Sameness.CONFIGURED, summary, [*configured, rest]
    if pairs and not any(pair.causes for pair in pairs):
        of = "the pair of requests" if len(pairs) == 1 else f"all {len(pairs):,} pairs of requests"
        return Sameness.SAME, f"The runs are the same: {of} made exactly the same decisions.", []
    if tau is None or tau.a is None or tau.visible is None:
        return Sameness.UNKNOWN, f"It cannot be told whether the runs differ: {_too_little(tau)}.", []
    covered = [f"compared: {seen}"]
    if tau.visible <= ENOUGH * tau.a:
        return Sameness.SAME, "The runs do not differ beyond error.", covered
    unseen = f"a change of tau below {100 * tau.visible / tau.a:.1f} % would not have been seen"
    return Sameness.UNKNOWN, f"No difference is seen, but too little was recorded to rule one out: {unseen}.", covered


def accused(pairs: Sequence[Pair], differences: Sequence[Difference]) -> dict[PartingCause, list[Pair]]:
    """Pairs by each cause that nothing harmless explains, where there are more of them than rounding makes.

    No rounding makes another coin: there one pair is enough.
    """
    suspects = {}
    for cause in PartingCause:
        mine = [pair for pair in pairs if cause in pair.causes]
        enough = bool(mine) and (cause is PartingCause.COIN or len(mine) > RARE * len(pairs))
        if cause.suspect and enough and not _explained(cause, differences):
            suspects[cause] = mine
    return suspects


def _explained(cause: PartingCause, differences: Iterable[Difference]) -> tuple[str, ...]:
    """What in the configuration explains a parting; what was asked for has its own settings alone."""
    if cause.suspect:
        return explaining(cause.stage, differences, alike=True)
    return tuple(difference.name for difference in differences if difference.enters is cause.stage)


def _parted(pairs: Sequence[Pair], cause: PartingCause) -> str:
    """How many pairs part by a cause; "" where none does."""
    count = sum(cause in pair.causes for pair in pairs)
    part = f"{count:,} of {plural(len(pairs), 'pair')} {'parts' if count == 1 else 'part'}"
    return f"{part}: {cause.about}" if count else ""


def _evidence(fields: Iterable[Field]) -> list[str]:
    suspects = sorted((field for field in fields if field.suspect), key=lambda field: -field.share)
    return [
        field.sentence
        + ("" if field.largest is None else f", by up to {field.largest:.3g}")
        + (f" ({field.condition})" if field.condition else "")
        for field in suspects
    ]


def _partings(found: Comparison) -> list[str]:
    return [
        f"{_parted(found.pairs, cause)}; first {pair.id_a} at output token {pair.causes[cause]:,}"
        for cause, (pair, *_) in accused(found.pairs, found.differences).items()
    ]


def _figures(found: Comparison) -> list[str]:
    lines = [f"{figure.name} {figure.change}" for figure in found.figures if figure.significant]
    for title, each in () if found.tau and found.tau.significant else found.groups.items():  # then every group differs
        lines += [f"{named(title, figure)} {figure.change}" for figure in each if figure.significant]
    return lines


def _loops(figures: Sequence[Estimate]) -> list[str]:
    """A difference in how much of the output lies in loops, with the acceptance length without these."""
    known = {
        figure.name: figure.change
        for figure in figures
        if figure.name != LOOPS or abs(figure.difference or 0.0) >= LOOPS_DIFFER
    }
    left = f"; {WITHOUT_LOOPS} {known[WITHOUT_LOOPS]}" if WITHOUT_LOOPS in known else ""
    says = "acceptance on text that loops says little of the drafter"
    return [f"{LOOPS} {known[LOOPS]}: {says}{left}"] if LOOPS in known else []


def _covered(found: Comparison) -> str:
    """What was judged and does not differ, with its n and unit; "" where nothing was."""
    judged = [field for field in found.fields if field.judged and field.compared and not field.explained]
    names = [f"{field.name} at {field.compared:,}" for field in judged[:NAMED]]
    names += [f"{len(judged) - NAMED} more"] if len(judged) > NAMED else []
    tau, contexts = found.tau, [f"{', '.join(names)} equal contexts"] if names else []
    acceptance = [] if tau is None or not tau.clusters else [f"acceptance over {plural(tau.clusters, 'request')}"]
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
