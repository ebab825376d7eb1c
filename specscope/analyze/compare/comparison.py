"""Two sides to a Comparison: the one function that text, page, screen and other tools call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from specscope.analyze.compare.align import Aligned, Matched, align, match, unpaired
from specscope.analyze.compare.config import NOT_KNOWN, Difference, differences, explaining
from specscope.analyze.compare.failif import GROUPED, FailCondition, counted, judge
from specscope.analyze.compare.fields import Field, fields
from specscope.analyze.compare.figures import alone, believed, clustered, figures, groups
from specscope.analyze.compare.parting import Partings
from specscope.analyze.compare.result import Comparison, Pair, SideFacts, judged
from specscope.analyze.compare.side import Side, SideRequest
from specscope.trace.history.conditions import Threshold
from specscope.trace.history.wording import plural
from specscope.trace.record.rules import MADE_UP
from specscope.trace.record.vocabulary import printable

TITLE = 200  # characters


@np.errstate(all="ignore")  # what is no number is evidence: it is compared as it is
def compare(a: Side, b: Side, limits: Sequence[Threshold] = ()) -> Comparison:
    """Two sides compared; differences are B - A. Raises UserError for limits on a figure that is not there."""
    matched = match(a, b) if a.tells_tokens and b.tells_tokens else []
    other, aligned = differences(a, b, matched), align(a, b, matched)
    nodes, steps, explained = len(aligned.tokens), len(aligned.steps), tuple(_explained(aligned, other))
    del aligned  # it is large, and so are the columns of the figures
    counts = clustered(a, b, matched)
    estimates, grouped = figures(*counts), groups(*counts, _groups_of(limits))
    changes = [*estimates, *counted(_counts(a), _counts(b))], grouped
    plain = [limit for limit in limits if not limit.of_change]
    alone_too = iter(judge_alone(b, plain) if plain else ())
    conditions = tuple(judge([limit], *changes)[0] if limit.of_change else next(alone_too) for limit in limits)
    a.forget()
    b.forget()
    first, second = (
        SideFacts(
            warnings=tuple(line for capture in side.captures for line in capture.warnings),
            target=_names(run.target for run in side.runs),
            drafter=_names(run.drafter for run in side.runs),
            requests=len(side.requests),
            unmatched=len(side.requests) - len(matched),
            engine_steps=sum(capture.engine_steps for capture in side.captures),
            decode_steps=len(side),
            tokens=len(side.columns.output),
            source=tuple(printable(capture.source) for capture in side.captures),
        )
        for side in (a, b)
    )
    return judged(
        Comparison(
            a=first,
            b=second,
            differences=tuple(other),
            missing=tuple(_missing(a, b, matched)),
            pairs=tuple(_pairs(a, b, matched)),
            nodes=nodes,
            steps=steps,
            fields=explained,
            figures=tuple(estimates),
            groups=grouped,
            conditions=conditions,
            unpaired=unpaired(a, b, matched),
        )
    )


def judge_alone(side: Side, limits: Sequence[Threshold]) -> list[FailCondition]:
    """The outcome of limits on the figures of a side as they are. Raises UserError for one that is not there."""
    estimates, grouped = alone(side, _groups_of(limits))
    return judge(limits, [*estimates, *counted(_counts(side), _counts(side))], grouped)


def _groups_of(limits: Sequence[Threshold]) -> set[str]:
    return {limit.figure.removeprefix(GROUPED).split(" is ")[0] for limit in limits}


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(map(printable, names))) or NOT_KNOWN


def _explained(aligned: Aligned, other: Sequence[Difference]) -> Iterator[Field]:
    """The evidence at equal contexts. What the configuration explains is not suspect."""
    for field in fields(aligned):
        doubted = field.suspect or field.unsure
        names = explaining(field.stage, other, alike=aligned.some_alike) if doubted else ()
        yield replace(field, suspect=False, unsure=False, explained=names) if names else field


def _pairs(a: Side, b: Side, matched: Matched) -> Iterator[Pair]:
    finder = Partings(a, b)
    for first, second, kind in matched:
        mine, theirs = both = a.requests[first], b.requests[second]
        parting, earlier = finder.of(mine, theirs, kind)
        (tau_a, drafts_a, tokens_a), (tau_b, drafts_b, tokens_b) = map(_acceptance, (a, b), both)
        title = "" if mine.info is None else (mine.info.title or mine.info.prompt)[: TITLE * 2]
        yield Pair(
            a=first,
            b=second,
            id_a=mine.id,
            id_b=theirs.id,
            title=printable(" ".join(title.split()))[:TITLE],
            match=kind,
            tokens=(tokens_a, tokens_b),
            tau=(tau_a, tau_b),
            drafts=(drafts_a, drafts_b),
            parting=parting,
            first=earlier,
        )


def _acceptance(side: Side, request: SideRequest) -> tuple[float | None, int, int]:
    """The acceptance length of a request, its drafts and output tokens."""
    rows = side.rows(request)
    accepted = side.columns.depth_reached[rows][side.drafts[rows]]
    return 1 + float(accepted.mean()) if len(accepted) else None, len(accepted), len(side.tokens(request))


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


def _missing(a: Side, b: Side, matched: Matched) -> list[str]:
    sides = (("A", a), ("B", b))
    lines = [f"{name} {says}" for name, side in sides for lacking, says in _lacks(side) if lacking]
    for name, side in sides:
        if part := sum(not request.whole for request in side.requests):
            lines.append(f"steps of {plural(part, 'request')} of {name} are missing: only distributions are compared")
    if a.tells_tokens and b.tells_tokens and not matched:
        lines.append(f"{unpaired(a, b, matched)}; only distributions are compared")
    return lines


def _lacks(side: Side) -> list[tuple[bool, str]]:
    """(whether it does, in words) of all that a side may lack."""
    c, made_up = side.columns, sorted(set(side.columns.rule.tolist()) & set(MADE_UP))
    untold = not side.tells_tokens, "was recorded with --no-tokens: requests, contexts and outputs are not compared"
    if not len(c.token):
        return [untold, (True, "has no drafts: acceptance is not compared")]
    no_q, no_raw = bool(np.isnan(believed(side)).all()), bool(np.isnan(side.raw_p[c.tried]).all())
    greedy = "has no raw probabilities (--evidence full): near ties of greedy requests are unknown"
    trees = "has trees that depend on costs, load, a threshold or other requests, so tau may differ"
    return [
        untold,
        (no_q, "does not record the drafter's probabilities: they are not compared"),
        (not no_q and not c.sampled.any(), "drafts without sampling: its q is the drafter's own probability"),
        (not side.has_coins, "records no coins: coins are not compared, and near ties are unknown"),
        (not side.has_p, "records no p: the target's probabilities are not compared"),
        (no_raw, greedy),
        (bool(side.varies.any()), trees),
        (bool(side.forced.any()), "has forced verdicts: its acceptance measures nothing"),
        (bool(made_up), f"has synthetic verdicts ({', '.join(made_up)}): its acceptance measures nothing"),
    ]
