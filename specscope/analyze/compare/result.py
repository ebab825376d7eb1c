"""What a comparison finds, as plain values, and the verdict over it: same, different or not known, with the reasons.

Filled by comparison.py; text, page, screen and JSON all show these. The reasons are exactly what the tables mark: `! `
before a field or a cause, `*` after a figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from specscope.analyze.compare.align import PairedBy
from specscope.analyze.compare.bootstrap import FEWEST, Estimate
from specscope.analyze.compare.config import Difference, StepStage, explaining, shifting
from specscope.analyze.compare.failif import FailCondition, named
from specscope.analyze.compare.fields import Field
from specscope.analyze.compare.parting import Parting, PartingCause
from specscope.trace.history.conditions import TAU
from specscope.trace.history.wording import plural
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.records import TEMPLATE

RARE = 0.01  # of the pairs; up to that share may be rounding, which has no sharp bound
ENOUGH = 0.05  # of A's acceptance length: where so small a change would have been seen, no difference means the same
DRAFTED_UNLIKE = 0.1  # of the steps; from there on the shares with drafts are named, since tau is of these steps alone
NAMED = 6  # kinds of evidence that a verdict names
ALOUD = {  # what differs at a stage, where nothing explains it
    StepStage.TARGET: "B's model gives other probabilities than A's for the same text",
    StepStage.SAMPLING: "B's model gives other probabilities than A's for the same text",
    StepStage.FEATURES: "B's drafter is fed other features than A's for the same text",
    StepStage.DRAFTER: "B's drafter gives other probabilities than A's for the same text",
    StepStage.COINS: "B uses other coins than A for the same seed and position",
    StepStage.TREE: "B drafts other tokens than A for the same text",
    StepStage.VERDICT: "B decides differently from A with the same probabilities and coins",
}


class Sameness(StrEnum):
    SAME = "same"
    CONFIGURED = "as configured"  # it differs where the configuration does, and nowhere else
    DIFFERENT = "different"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Pair:
    a: int  # place in Side.requests
    b: int
    id_a: str
    id_b: str
    title: str
    match: PairedBy
    tokens: tuple[int, int]
    tau: tuple[float | None, float | None]
    drafts: tuple[int, int]  # steps with drafts
    parting: Parting | None = None  # None where the outputs are the same
    first: Parting | None = None  # the first decision that differs, where that is before the parting

    @property
    def same(self) -> bool:
        return self.parting is None

    @property
    def causes(self) -> dict[PartingCause, int]:
        """Of its first differing decision and of where its outputs part, with the output tokens before it."""
        both = [parting for parting in (self.parting, self.first) if parting is not None]
        return {parting.cause: parting.position for parting in both}


@dataclass(frozen=True)
class SideFacts:
    warnings: tuple[str, ...]
    target: str
    drafter: str
    requests: int
    unmatched: int
    engine_steps: int
    decode_steps: int
    tokens: int
    source: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that `specscope compare` shows."""

    a: SideFacts
    b: SideFacts
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]  # what a side lacks, and what was therefore not compared
    pairs: tuple[Pair, ...]
    nodes: int  # at equal contexts
    steps: int  # at equal contexts
    fields: tuple[Field, ...]
    figures: tuple[Estimate, ...]
    groups: dict[str, tuple[Estimate, ...]]  # acceptance length by group
    conditions: tuple[FailCondition, ...]
    unpaired: str  # why there is no pair, in a sentence; "" where there is one
    answer: Sameness = Sameness.UNKNOWN  # this and the next three are the verdict's
    summary: str = ""  # it in a sentence
    headline: str = ""  # the acceptance length of both sides, its change and interval
    reasons: tuple[str, ...] = ()  # what speaks for it, the strongest first

    sides = cached_property[dict[str, SideFacts]](lambda found: {"A": found.a, "B": found.b})
    # The primary figure, None where it is not known on both sides; the acceptance rate of each depth
    tau = cached_property[Estimate | None](lambda found: next((one for one in found.figures if one.name == TAU), None))
    depths = cached_property[list[Estimate]](lambda found: [one for one in found.figures if one.name[:6] == "depth "])
    # The settings that explain whatever figure differs
    settings = cached_property[tuple[str, ...]](lambda found: shifting(found.differences))

    @property
    def grouped(self) -> list[tuple[str, Estimate]]:
        """(the group, its figure with the group in its name) of each row of the groups."""
        rows = [(title, figure) for title, each in self.groups.items() for figure in each]
        return [(title, replace(figure, name=f"{title}: {figure.name}")) for title, figure in rows]

    @property
    def partings(self) -> dict[PartingCause, int]:
        """How many pairs part, by cause, the most frequent first."""
        return dict(Counter(pair.parting.cause for pair in self.pairs if pair.parting is not None).most_common())

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {line}" for name, side in self.sides.items() for line in side.warnings]

    @property
    def exit_code(self) -> int:
        """1 where something differs beyond error and not as configured, else 0; --fail-if alone decides."""
        hit = any(condition.hit for condition in self.conditions)
        return int(hit if self.conditions else self.answer is Sameness.DIFFERENT)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"partings": {str(cause): n for cause, n in self.partings.items()}}


def judged(found: Comparison) -> Comparison:
    """A comparison with its verdict: the answer, a sentence that states it, the reasons, and the acceptance length."""
    reasons = [*_evidence(found.fields), *_partings(found), *([] if found.settings else _figures(found))]
    if reasons:
        answer, summary = Sameness.DIFFERENT, _different(found, reasons)
    else:
        answer, summary, reasons = _without_reasons(found)
    summary = " ".join(filter(None, (_drafted(found), _acceptance(found.tau), summary)))
    return replace(found, answer=answer, summary=summary, reasons=tuple(reasons), headline=headline(found.tau))


def _drafted(found: Comparison) -> str:
    """What tau leaves out, where that is much more on one side."""
    tokens = next((figure for figure in found.figures if figure.name == "tokens per step"), None)
    steps = found.a.decode_steps, found.b.decode_steps
    if found.tau is None or tokens is None or not all(steps):
        return ""
    a, b = (drafts / of for drafts, of in zip(found.tau.weight, steps, strict=True))
    says = f"τ counts only steps with drafts: {100 * a:.0f} % of A's, {100 * b:.0f} % of B's."
    return f"{says} Output tokens per step: {tokens.a:.2f} → {tokens.b:.2f}." if abs(a - b) > DRAFTED_UNLIKE else ""


def _acceptance(tau: Estimate | None) -> str:
    """What changed for the user; "" where no change is shown."""
    if tau is None or tau.difference is None or not tau.significant:
        return ""
    way = "fewer" if tau.difference < 0 else "more"
    return f"B gets {way} tokens per draft than A: {tau.b:.2f} instead of {tau.a:.2f}."


def _different(found: Comparison, reasons: Sequence[str]) -> str:
    """What differs first in a step, as one would say it: it explains what follows."""
    more = len(reasons) - 1
    if found.tau is not None and found.tau.significant and not found.settings:
        return f"{plural(more, 'other difference')} {'is' if more == 1 else 'are'} listed below." if more else ""
    of_evidence = (field.stage for field in found.fields if field.suspect)
    stages = {*of_evidence, *(cause.stage for cause in accused(found.pairs, found.differences))}
    says = next((ALOUD[stage] for stage in StepStage if stage in stages), "")
    if says:
        return f"{says}, and nothing in the configuration explains it."
    return f"The runs differ, and nothing in the configuration explains it: {reasons[0]}."


def _without_reasons(found: Comparison) -> tuple[Sameness, str, list[str]]:
    pairs, fields, tau, seen = found.pairs, found.fields, found.tau, _covered(found)
    configured = [
        f"{field.sentence}, as configured: {', '.join(field.explained)}" for field in fields if field.explained
    ]
    causes = sorted((cause for cause in PartingCause if cause.stage), key=lambda cause: not cause.suspect)
    asked = [(_parted(pairs, cause), _explained(cause, found.differences)) for cause in causes]
    configured += [f"{parted}, as configured: {', '.join(names)}" for parted, names in asked if parted and names]
    configured += [f"{line}, as configured: {', '.join(found.settings)}" for line in _figures(found)]
    untold = [parted for cause in (PartingCause.CHOICE, PartingCause.UNKNOWN) if (parted := _parted(pairs, cause))]
    untold += [f"{field.sentence}, {field.note}" for field in fields if field.unsure]
    if untold:
        return Sameness.UNKNOWN, f"Whether the runs differ is unknown: {untold[0]}.", [*untold[1:], *configured]
    if configured:
        lines = found.differences
        why = ", ".join(line.name for line in lines if line.enters or line.name in (TEMPLATE, *PARAM_NAMES))
        rest = f"Nothing else differs. Compared: {seen}" if seen else "nothing else could be compared"
        summary = f"Only the configured settings differ{f' ({why})' if why else ''}."
        return Sameness.CONFIGURED, summary, [*configured, rest]
    if pairs and not any(pair.causes for pair in pairs):
        of = "the pair of requests" if len(pairs) == 1 else f"all {len(pairs):,} pairs of requests"
        return Sameness.SAME, f"The runs are the same: {of} made exactly the same decisions.", []
    if tau is None or tau.a is None or tau.visible is None:
        return Sameness.UNKNOWN, f"Whether the runs differ is unknown: {_too_little(tau)}.", []
    covered = [f"compared: {seen}"]
    if tau.visible <= ENOUGH * tau.a:
        return Sameness.SAME, "The runs do not differ beyond error.", covered
    unseen = f"a change of tau below {100 * tau.visible / tau.a:.1f} % would have been missed"
    return Sameness.UNKNOWN, f"No difference was found, but too little was recorded to rule one out: {unseen}.", covered


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


def _covered(found: Comparison) -> str:
    """What was judged and does not differ, with its n and unit; "" where nothing was."""
    judged = [field for field in found.fields if field.compared and not field.explained]
    names = [f"{field.name} ({field.compared:,})" for field in judged[:NAMED]]
    names += [f"{len(judged) - NAMED} more"] if len(judged) > NAMED else []
    of = 0 if found.tau is None or _figures(found) else found.tau.clusters
    acceptance = [f"acceptance ({plural(of, 'request')})"] if of else []
    return ", ".join([*acceptance, *(["at equal contexts " + ", ".join(names)] if names else [])])


def headline(tau: Estimate | None) -> str:
    """`tau 2.42 → 2.32, -4.3 % (95 %: -6.9 to -1.6 %) over 24 requests`, and whether a change is shown."""
    if tau is None or tau.a is None or tau.b is None or tau.difference is None:
        return "tau is not known on both sides"
    both = f"{TAU} {tau.a:.2f} → {tau.b:.2f}, {100 * tau.difference / tau.a:+.1f} %"
    if tau.low is None or tau.high is None:
        return f"{both}; {_too_little(tau)}"
    low, high = (100 * end for end in (tau.low / tau.a, tau.high / tau.a))
    text = f"{both} (95 %: {low:+.1f} to {high:+.1f} %)"
    if tau.visible is None and not tau.significant:
        return f"{text}; {_too_little(tau)}"
    text += f" over {plural(tau.clusters, 'request')}"
    if tau.significant or not tau.visible:
        return text
    return f"{text}: no change found; {100 * tau.visible / tau.a:.1f} % or more would have been seen"


def _too_little(tau: Estimate | None) -> str:
    if tau is None or tau.difference is None:
        return "there are no drafts on one side or both"
    few = f"{'is' if tau.clusters == 1 else 'are'} too few"
    if tau.low is None:
        return f"{plural(tau.clusters, 'request')} with drafts on both sides {few} for an interval (at least {FEWEST})"
    return f"{plural(tau.clusters, 'request')} {few} to see any change in {TAU}"
