"""Two sides to a Comparison: the one function that text, page, screen and other tools call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from specscope.analyze.compare.columns import Side, SideRequest
from specscope.analyze.compare.configuration import differences
from specscope.analyze.compare.contexts import align
from specscope.analyze.compare.distributions import believed, calibration, clustered, figures, groups
from specscope.analyze.compare.evidence import fields
from specscope.analyze.compare.explained import explained
from specscope.analyze.compare.failif import FailLimit, judge
from specscope.analyze.compare.parting import Partings
from specscope.analyze.compare.result import Comparison, Pair, PairedBy, SideFacts
from specscope.analyze.compare.verdict import verdict
from specscope.trace.history.wording import plural
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.tree import Bools, Drawn
from specscope.trace.record.vocabulary import printable

# Which request of one side belongs to which of the other.


def match(a: Side, b: Side) -> list[tuple[int, int, PairedBy]]:
    """Pairs of places in both lists of requests, in A's order.

    Matched by prompt and all parameters, then without the seed, then by prompt alone, then by order.
    Of several equal requests, the first of A is paired with the first of B. Only requests whose prompt is not known on
    one side (captures made with --no-text) are paired by order: requests with different prompts make no pair. Nor do
    requests of which steps are missing.
    """
    left, right = ({i: request for i, request in enumerate(side.requests) if request.whole} for side in (a, b))
    pairs: list[tuple[int, int, PairedBy]] = []
    for kind, key in _KEYS:
        theirs: dict[Hashable, list[int]] = defaultdict(list)
        for place, request in right.items():
            if (mark := key(request)) is not None:
                theirs[mark].append(place)
        for place, request in list(left.items()):
            mark = key(request)
            if mark is not None and theirs[mark]:
                other = theirs[mark].pop(0)
                pairs.append((place, other, kind))
                del left[place], right[other]
    for place in list(left):
        other_place = next((o for o in right if _prompt(left[place]) is None or _prompt(right[o]) is None), None)
        if other_place is not None:
            pairs.append((place, other_place, PairedBy.ORDER))
            del left[place], right[other_place]
    return sorted(pairs)


def _prompt(request: SideRequest) -> Hashable | None:
    """The prompt's tokens, or its text; None where neither is known."""
    if request.info is None:
        return None
    tokens = request.info.prompt_tokens
    return tokens.tobytes() if len(tokens) else request.info.prompt or None


def _with(*left_out: str) -> Callable[[SideRequest], Hashable | None]:
    names = sorted(PARAM_NAMES - set(left_out))

    def key(request: SideRequest) -> Hashable | None:
        prompt = _prompt(request)
        if prompt is None or request.info is None:
            return None
        params = request.info.params
        return prompt, tuple(map(_plain, (getattr(params, name) for name in names)))

    return key


def _plain(value: object) -> Hashable:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else str(value)


_KEYS: tuple[tuple[PairedBy, Callable[[SideRequest], Hashable | None]], ...] = (
    (PairedBy.EXACT, _with()),
    (PairedBy.SEED, _with("seed")),
    (PairedBy.PROMPT, _prompt),
)


TITLE = 200  # characters


@np.errstate(all="ignore")  # what is no number is evidence: it is compared as it is
def compare(a: Side, b: Side, limits: Sequence[FailLimit] = ()) -> Comparison:
    """Two sides compared; differences are B - A. Raises UserError for limits on a figure that is not there."""
    matched = match(a, b) if a.tells_tokens and b.tells_tokens else []
    aligned = align(a, b, matched)
    counts = clustered(a, b, matched)
    pairs, estimates, grouped = _pairs(a, b, matched), tuple(figures(*counts)), groups(*counts)
    other = tuple(differences(a, b, matched))
    evidence = tuple(explained(fields(aligned), other, alike=aligned.some_alike))
    judged = verdict(pairs, evidence, estimates, grouped, other)
    return Comparison(
        a=_facts(a, len(matched)),
        b=_facts(b, len(matched)),
        answer=judged.answer,
        summary=judged.summary,
        headline=judged.headline,
        reasons=judged.reasons,
        differences=other,
        missing=tuple(_missing(a, b, matched)),
        pairs=pairs,
        nodes=len(aligned.given.places[0]),
        steps=len(aligned.steps[0]),
        fields=evidence,
        figures=estimates,
        groups=grouped,
        calibration=tuple(calibration(a, b)),
        conditions=tuple(judge(limits, estimates, grouped)),
    )


def _pairs(a: Side, b: Side, matched: Sequence[tuple[int, int, PairedBy]]) -> tuple[Pair, ...]:
    finder = Partings(a, b)
    pairs = []
    for first, second, kind in matched:
        mine, theirs = a.requests[first], b.requests[second]
        parting, earlier = finder.of(mine, theirs, kind)
        pairs.append(
            Pair(
                a=first,
                b=second,
                id_a=mine.id,
                id_b=theirs.id,
                title=_title(mine),
                match=kind,
                tokens=(len(a.tokens(mine)), len(b.tokens(theirs))),
                tau=(_tau(a, mine), _tau(b, theirs)),
                drafts=(int(_drafts(a, mine).sum()), int(_drafts(b, theirs).sum())),
                parting=parting,
                first=earlier,
            )
        )
    return tuple(pairs)


def _title(request: SideRequest) -> str:
    info = request.info
    return "" if info is None else printable(" ".join((info.title or info.prompt)[: TITLE * 2].split()))[:TITLE]


def _drafts(side: Side, request: SideRequest) -> Bools:
    """Which of a request's steps drafted."""
    steps = side.steps[side.rows(request)]
    drafts: Bools = steps["judged"] & (steps["nodes"] > 0)
    return drafts


def _tau(side: Side, request: SideRequest) -> float | None:
    accepted, drafts = side.steps["accepted"][side.rows(request)], _drafts(side, request)
    return 1 + float(accepted[drafts].sum()) / int(drafts.sum()) if drafts.any() else None


def _facts(side: Side, matched: int) -> SideFacts:
    runs = [capture.run for capture in side.captures if capture.run is not None]
    return SideFacts(
        sources=tuple(printable(capture.source) for capture in side.captures),
        warnings=tuple(line for capture in side.captures for line in capture.warnings),
        target=", ".join(dict.fromkeys(printable(run.target) for run in runs)) or "not known",
        drafter=", ".join(dict.fromkeys(printable(run.drafter) for run in runs)) or "not known",
        requests=len(side.requests),
        unmatched=len(side.requests) - matched,
        engine_steps=sum(capture.engine_steps for capture in side.captures),
        decode_steps=int(side.steps["judged"].sum()),
        tokens=len(side.output),
    )


def _missing(a: Side, b: Side, matched: Sequence[tuple[int, int, PairedBy]]) -> list[str]:
    """What a side lacks, and what was therefore left out."""
    lines = []
    for name, side in (("A", a), ("B", b)):
        nodes = side.nodes
        if not side.tells_tokens:
            lines.append(f"{name} was recorded with --no-tokens: requests, contexts and outputs are not compared")
        if not len(nodes["token"]):
            lines.append(f"{name} has no drafts: acceptance is not compared")
            continue
        if np.isnan(believed(side)).all():
            lines.append(
                f"{name} does not record the drafter's probabilities: calibration is not compared, nor are they"
            )
        elif (nodes["drawn"] == Drawn.DETERMINISTIC).all():
            lines.append(f"{name} drafts without sampling: its q is the drafter's own probability")
        if not side.has_coins:
            lines.append(f"{name} records no coins: coins are not compared, and near ties not known")
        if not side.has_p:
            lines.append(f"{name} records no p: the target's probabilities are not compared")
        if np.isnan(nodes["raw_p"][side.tried]).all():
            lines.append(
                f"{name} has no raw probabilities (--evidence full): near ties of greedy requests are not known"
            )
        if side.steps["varies"].any():
            lines.append(f"{name} has trees that follow costs, load, a threshold or other requests: so tau may differ")
        if side.steps["forced"].any():
            lines.append(f"{name} has forced verdicts: its acceptance measures nothing")
    if matched and all(kind is PairedBy.ORDER for _, _, kind in matched):
        lines.append("prompts are not recorded: requests are paired by their order")
    for name, side in (("A", a), ("B", b)):
        if part := sum(not request.whole for request in side.requests):
            lines.append(f"steps of {plural(part, 'request')} of {name} are missing: only distributions are compared")
    if (
        not matched
        and all(request.whole for side in (a, b) for request in side.requests)
        and a.tells_tokens
        and b.tells_tokens
    ):
        lines.append("no request of A has the prompt of one of B: only distributions are compared")
    return lines
