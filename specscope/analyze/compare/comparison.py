"""Two sides to a Comparison: the one function that text, page, screen and other tools call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specscope.analyze.compare.align import Matched, align, hint, match, unpaired
from specscope.analyze.compare.config import differences, explained, models
from specscope.analyze.compare.failif import GROUPED, counted, judge
from specscope.analyze.compare.fields import fields
from specscope.analyze.compare.figures import believed, calibration, clustered, figures, groups
from specscope.analyze.compare.parting import Partings
from specscope.analyze.compare.result import NOT_KNOWN, Comparison, Pair, PairedBy, Sameness, SideFacts
from specscope.analyze.compare.side import Side, SideRequest
from specscope.analyze.compare.trees import trees
from specscope.analyze.compare.verdict import judged
from specscope.trace.history.conditions import Threshold
from specscope.trace.history.wording import plural
from specscope.trace.record.rules import MADE_UP
from specscope.trace.record.vocabulary import printable

TITLE = 200  # characters


@np.errstate(all="ignore")  # what is no number is evidence: it is compared as it is
def compare(a: Side, b: Side, limits: Sequence[Threshold] = ()) -> Comparison:
    """Two sides compared; differences are B - A. Raises UserError for limits on a figure that is not there."""
    matched = match(a, b) if a.tells_tokens and b.tells_tokens else []
    aligned, counts, names = align(a, b, matched), clustered(a, b, matched), models(a, b)
    asked = {limit.figure.removeprefix(GROUPED).split(" is ")[0] for limit in limits}
    estimates, grouped, other = tuple(figures(*counts)), groups(*counts, asked), tuple(differences(a, b, matched))
    evidence = fields(aligned, trees(aligned))
    return judged(
        Comparison(
            a=_facts(a, names[0], len(matched)),
            b=_facts(b, names[1], len(matched)),
            answer=Sameness.UNKNOWN,
            summary="",
            headline="",
            reasons=(),
            differences=other,
            missing=tuple(_missing(a, b, matched)),
            pairs=_pairs(a, b, matched),
            nodes=len(aligned.tokens),
            steps=len(aligned.steps),
            fields=tuple(explained(evidence, other, alike=aligned.some_alike)),
            figures=estimates,
            groups=grouped,
            calibration=tuple(calibration(a, b)),
            conditions=tuple(judge(limits, [*estimates, *counted(_counts(a), _counts(b))], grouped)),
            unpaired=unpaired(a, b, matched),
        )
    )


def _pairs(a: Side, b: Side, matched: Matched) -> tuple[Pair, ...]:
    finder, pairs = Partings(a, b), []
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
                drafts=(int(a.drafts[a.rows(mine)].sum()), int(b.drafts[b.rows(theirs)].sum())),
                parting=parting,
                first=earlier,
            )
        )
    return tuple(pairs)


def _counts(side: Side) -> dict[str, int | None]:
    """What a --fail-if may ask for beside the figures."""
    c = side.columns
    return {
        "drafts": int(side.drafts.sum()),
        "drafted": len(c.token),
        "accepted": int(c.depth_reached.sum()),
        "output tokens": len(c.output),
        "requests": len(side.requests),
    }


def _title(request: SideRequest) -> str:
    info = request.info
    return "" if info is None else printable(" ".join((info.title or info.prompt)[: TITLE * 2].split()))[:TITLE]


def _tau(side: Side, request: SideRequest) -> float | None:
    rows = side.rows(request)
    drafts = side.drafts[rows]
    return 1 + float(side.columns.depth_reached[rows][drafts].mean()) if drafts.any() else None


def _facts(side: Side, target: str, matched: int) -> SideFacts:
    return SideFacts(
        sources=tuple(printable(capture.source) for capture in side.captures),
        warnings=tuple(line for capture in side.captures for line in capture.warnings),
        target=target,
        drafter=", ".join(dict.fromkeys(printable(run.drafter) for run in side.runs)) or NOT_KNOWN,
        requests=len(side.requests),
        unmatched=len(side.requests) - matched,
        engine_steps=sum(capture.engine_steps for capture in side.captures),
        decode_steps=len(side),
        tokens=len(side.columns.output),
    )


def _missing(a: Side, b: Side, matched: Matched) -> list[str]:
    """What a side lacks, and what was therefore left out."""
    lines = []
    for name, side in (("A", a), ("B", b)):
        lines += [f"{name} {says}" for lacking, says in _lacks(side) if lacking]
    if matched and all(kind is PairedBy.ORDER for _, _, kind in matched):
        lines.append("prompts are not recorded: requests are paired by their order")
    for name, side in (("A", a), ("B", b)):
        if part := sum(not request.whole for request in side.requests):
            lines.append(f"steps of {plural(part, 'request')} of {name} are missing: only distributions are compared")
    if a.tells_tokens and b.tells_tokens:
        why = hint(a, b, matched) if matched else unpaired(a, b, matched)
        lines += [why if matched else f"{why}; only distributions are compared"] if why else []
    return lines


def _lacks(side: Side) -> list[tuple[bool, str]]:
    """(whether it does, in words) of all that a side may lack."""
    c, made_up = side.columns, sorted(set(side.rules) & set(MADE_UP))
    untold = not side.tells_tokens, "was recorded with --no-tokens: requests, contexts and outputs are not compared"
    if not len(c.token):
        return [untold, (True, "has no drafts: acceptance is not compared")]
    no_q = bool(np.isnan(believed(side)).all())
    return [
        untold,
        (no_q, "does not record the drafter's probabilities: calibration is not compared, nor are they"),
        (not no_q and not c.sampled.any(), "drafts without sampling: its q is the drafter's own probability"),
        (not side.has_coins, "records no coins: coins are not compared, and near ties not known"),
        (not side.has_p, "records no p: the target's probabilities are not compared"),
        (
            bool(np.isnan(side.raw_p[c.tried]).all()),
            "has no raw probabilities (--evidence full): near ties of greedy requests are not known",
        ),
        (
            bool(side.varies.any()),
            "has trees that follow costs, load, a threshold or other requests: so tau may differ",
        ),
        (bool(side.forced.any()), "has forced verdicts: its acceptance measures nothing"),
        (bool(made_up), f"has made-up verdicts ({', '.join(made_up)}): its acceptance measures nothing"),
    ]
