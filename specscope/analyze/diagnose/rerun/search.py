"""Which named mistake gives what was recorded: a model run again under each of them, up to where a request differs.

What a mistake writes into masks, KV or features stays there, so each is judged by the first step that differs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rows import Models, recorded, rows_of
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import LOG_CHANCE, JudgedCase, Suspect
from specscope.analyze.diagnose.rerun import head as heads
from specscope.analyze.diagnose.rerun import target as targets
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.decided import decide, interval_of
from specscope.analyze.locate.located import Located, Proof
from specscope.analyze.locate.model.rules import OF_OTHERS, SampledFault
from specscope.analyze.locate.model.sampling import OF_REQUESTS, RIGHT, ROWS, TEMPERATURE, Places, RuledRows
from specscope.analyze.verify.trial import Case, Step
from specscope.plans.kinds import runs_head
from specscope.trace.history.wording import plural
from specscope.trace.record.rules import ROUNDING, STANDARD
from specscope.trace.record.tree import ROOT, Doubles

REQUESTS, LONGEST = 8, 60  # whose first step that differs is looked at; steps up to it
ALONG = 12  # steps, up to which a mistake that was at work all along is tried
BACK = 3  # steps before it in which the mistake may have been at work
FEW = 2  # requests that every mistake is asked about
NEAR = 0.2  # below the best gain there: a mistake that comes so near is asked about all requests
ENOUGH, SOME = 3, 0.02  # parents that differ, and of all: fewer are no sign of a mistake
NEARLY = 0.98  # of the parents must come out as recorded
HALF = 0.5  # of those that differ must, where no other cause explains half as many
# The checks of raw probabilities, and of what the sampling rules make of them
OF_TARGET = ("target raw p", "target top tokens"), ("target p",)
OF_DRAFTER = ("drafter top tokens",), ("draft p", "drafter tokens")
OF_HEADS: Mapping[str, tuple[type[heads.MovedHead], Sequence[heads.HeadMistake]]] = {  # by kind, with the mistakes
    "eagle": (heads.MovedHead, heads.MISTAKES),
    "dflash": (heads.MovedBlock, heads.MISTAKES),
    "mtp": (heads.MovedModules, heads.OF_MODULES),
}
Begin = Sequence[Step]  # a request's steps up to the first that differs, which is the last of these
Mistake = targets.TreeMistake | heads.HeadMistake
LEAST = 3e-4  # probabilities that differ by less are the same


def mistakes(session: JudgedCase, *, drafter: bool) -> list[Suspect]:
    """What a model is fed and how its tree is seen, where its raw probabilities differ; else the sampling rules."""
    case, models, (raw, ruled) = session.case, session.models, OF_DRAFTER if drafter else OF_TARGET
    run = case.history.run
    is_head = drafter and run is not None and runs_head(run.drafter)
    model = None if is_head else models.draft if drafter else models.target
    if model is not None and model.runs_on:  # these mistakes are attention's
        return []
    names, raw_differs = (*raw, *ruled) if drafter else raw, bool(first_differing(session.audited, raw))
    first = first_differing(session.audited, names)
    sampled = [] if raw_differs else _sampled(session, (*raw, *ruled), drafter=drafter)
    if sampled or not first:
        return sampled
    if model is None:
        assert models.options.draft is not None
        moved, of_kind = OF_HEADS[models.options.draft.kind]
        found = _explained(Rerun(heads.HeadAgain(models, case, moved), case, drafter=True), of_kind, first)
    else:
        known = [*targets.of_drafter(case)] if drafter else targets.MISTAKES
        found = _explained(Rerun(targets.ModelAgain(model), case, drafter=drafter), known, first)
    return found or (_sampled(session, (*raw, *ruled), drafter=drafter) if raw_differs else [])


def other_decisions(session: JudgedCase) -> list[Suspect]:
    """Another row's p, or p at another temperature, that gives the outcomes of drafts decided against their own."""
    return [_named(Cause.P_NOT_USED, at) for at in session.verdicts if at.operation.name == "p" and at.unit == "draft"]


def first_differing(audit: Audit, names: Sequence[str]) -> dict[str, int]:
    """By request the first step at which one of these quantities differs."""
    findings = filter(None, map(audit.finding, names))
    items = [item for finding in findings for item in compress(finding.items, finding.differs)]
    return {item.request: item.index for item in sorted(items, key=lambda item: -item.index)}


def _named(cause: Cause, at: Located) -> Suspect:
    return Suspect(cause, Proof.ROWS, (at.sentence,), at.where, at.explained, at.differing, rerun=True)


def _sampled(session: JudgedCase, names: Sequence[str], *, drafter: bool) -> list[Suspect]:
    """The variant of the sampling rules, or the row of elsewhere, that gives the recorded p, or q."""
    differs = first_differing(session.audited, names)
    sampled = None if not differs else session.q if drafter else session.p
    cause = None if sampled is None else _cause(sampled)
    if sampled is None or cause is None:
        return []
    suspect, drawn = _named(cause, sampled.located), session.case.checks["drafted surprisal"]
    if (
        cause is Cause.Q_TEMPERATURE
        and drawn.result is CheckResult.PASSED
        and 2 * sampled.located.differing > drawn.tested
    ):
        lossless = "drafts follow the q that is recorded, so the output is the target's; fewer drafts are accepted"
        suspect = replace(suspect, cause=Cause.RULES_WRONG, for_=(*suspect.for_, lossless))
    return [suspect]


def _cause(sampled: SampledFault) -> Cause | None:
    """The familiar name of what was found; of raw probabilities only whose row they are is said."""
    is_q, is_raw = sampled.what.endswith("q"), sampled.what.startswith("raw")
    other = Cause.Q_OTHER_ROW if is_q else Cause.P_OTHER_ROW
    if sampled.whose and is_raw and not sampled.located.certain:
        return None  # some of a wrong output is like another row's by chance
    if sampled.whose:  # another q is used for the ratio test; another drafter's output is another request's
        return Cause.ROWS_SWAPPED if sampled.whose == OF_OTHERS and (is_raw or not is_q) else other
    change = sampled.change
    assert change is not None
    if change.operation == ROWS:
        of_requests = {f"the row of {relation.name}" for relation in OF_REQUESTS}
        return Cause.ROWS_SWAPPED if not is_q and change.name in of_requests else other
    if is_raw:
        return Cause.LOGITS_SCALED if change.fitted else None
    return Cause.Q_TEMPERATURE if is_q and change.operation == TEMPERATURE else Cause.RULES_WRONG


# How well what was recorded comes out


@dataclass(frozen=True)
class Match:
    """Parents at which the recorded likeliest tokens have the probabilities that were computed."""

    same: int = 0
    total: int = 0
    off: float = 0.0  # the sum over parents of their largest deviation

    @property
    def share(self) -> float:
        return self.same / max(self.total, 1)

    @property
    def differ(self) -> int:
        return self.total - self.same

    @property
    def mean(self) -> float:
        return self.off / max(self.total, 1)

    def given(self, right: Match) -> float:
        """The share of the parents: where it gives nothing of most of them, of half of all."""
        return self.same / max(self.total, right.total / 2, 1)

    def gain(self, right: Match) -> float:
        """How much of what differs without any mistake (`right`) is explained: 1 all of it, 0 nothing.

        By the parents that differ; where rounding hides these, by how far probabilities are off: one parent or two
        come out by chance.
        """
        if not self.total or not right.total:
            return 0.0
        counted = (self.given(right) - right.share) / (1 - right.share) if right.share < 1 else 0.0
        if right.share < 0.9 or not right.mean or self.total < right.total:
            return counted
        closer = 1 - self.mean / right.mean
        return closer if right.differ < ENOUGH else max(counted, closer)

    def __add__(self, other: Match) -> Match:
        return Match(self.same + other.same, self.total + other.total, self.off + other.off)

    def __str__(self) -> str:
        return f"{self.same:,} of {self.total:,} (off by {self.mean:.2g} on average)"


def compared(
    step: Step, logits: Mapping[int, Tensor], dtype: str, *, drafter: bool, known: int | None, first: bool
) -> Match:
    """A step's parents. `logits` [V] at root and nodes; `known`: only so many first tokens can be chosen; `first`: of
    the root alone, whose pass is the first."""
    match, allowed = Match(), max(LEAST, 2 * ROUNDING.get(dtype, ROUNDING["bfloat16"]))
    for parent, tokens, probs in recorded(step, drafter=drafter):
        if parent not in logits or (first and parent != ROOT):
            continue
        row = logits[parent].clone()
        row[len(row) if known is None else known :] = -np.inf
        p = row.softmax(-1)
        likeliest = p.topk(len(tokens)).values.numpy()
        there = likeliest if probs is None else probs  # tokens without probabilities must be the likeliest
        deviation = float(np.abs(p[tokens.tolist()].numpy() - there).max())
        match += Match(int(deviation <= allowed), 1, deviation)
    return match


@dataclass(frozen=True)
class Rerun:
    """A model that is asked how well what was recorded comes out under a mistake."""

    again: Any  # ModelAgain or HeadAgain
    case: Case
    drafter: bool
    first: bool = False  # whether the first pass of a step is looked at alone

    def matches(self, steps: Begin, mistake: Mistake, back: int | None, *, every: bool = False) -> Iterator[Match]:
        """The last of these steps, or every one. `back`: the mistake is at work so many steps before; None: in all."""
        for step, rows in self.again.rows(steps, mistake, back, every=every):
            dtype, known = self.case.dtype, mistake.known
            yield compared(step, rows, dtype, drafter=self.drafter, known=known, first=self.first)

    def last(self, steps: Begin, mistake: Mistake, back: int | None = None) -> Match:
        return next(self.matches(steps, mistake, back), Match())

    def best(self, steps: Begin, mistake: Mistake) -> Match:
        """The same, the mistake at work all along or in one of the last steps: where it explains the most."""
        backs, best = [*([None] if len(steps) <= ALONG else []), *range(min(BACK, len(steps) - 1) + 1)], list[Match]()
        while backs and not (best and best[-1].share > NEARLY):
            best.append(self.last(steps, mistake, backs.pop(0)))
        return max(best, key=lambda match: (match.share, -match.mean))


def _begins(asked: Rerun, first: Mapping[str, int]) -> list[Begin]:
    """Of some requests the steps up to the first that differs; `first`: of those that were audited."""
    begins: dict[str, list[Step]] = {name: [] for name in first}
    for step in asked.case.steps:
        if step.part.index <= first.get(step.request, -1):
            begins[step.request].append(step)
    cut: list[Begin] = []
    for steps in sorted(filter(_is_whole, begins.values()), key=len)[:REQUESTS]:
        matches = asked.matches(steps, asked.again.right, None, every=True)
        place = next((place for place, match in enumerate(matches) if match.differ), len(steps) - 1)
        cut.append(steps[: place + 1])
    return cut


def _is_whole(steps: Begin) -> bool:
    """Whether they begin with the request, and none follows a gap."""
    gaps = any(step.visit.preempted or step.part.position != step.after - 1 for step in steps)
    return 0 < len(steps) <= LONGEST and steps[0].last is None and not gaps


def _cut(right: Mistake, case: Case, begins: Sequence[Begin]) -> Iterator[Mistake]:
    """A choice among the first tokens alone, that hold all that was drafted: in the run, or where requests differ."""
    for steps in (case.drafting, [begin[-1] for begin in begins]):
        likeliest = (each for step in steps for each in recorded(step, drafter=True))
        came = [tokens if probs is None else tokens[probs > 0] for _, tokens, probs in likeliest]
        largest = max((int(some.max(initial=0)) for some in (*came, *(step.tree.token for step in steps))), default=0)
        name = f"a choice among the first {largest + 1:,} tokens only"
        yield replace(right, name=name, cause=Cause.DRAFT_VOCABULARY, known=largest + 1)


def _explained(asked: Rerun, known: Sequence[Mistake], first: Mapping[str, int]) -> list[Suspect]:
    """The mistakes that give the first steps that differ: nearly all of them, or far more than any other mistake. Each
    is asked about the few requests that differ most, and where it comes near the best about all.
    """
    begins: list[Begin] = _begins(asked, first)
    base = {n: asked.last(steps, asked.again.right) for n, steps in enumerate(begins)}
    right: Match = sum(base.values(), Match())
    if right.total < ENOUGH or (right.share > 1 - SOME and asked.case.dtype == "float32"):
        return []
    few = sorted(base, key=lambda n: base[n].share)[:FEW]
    every = [*known, *(_cut(asked.again.right, asked.case, begins) if asked.drafter else ())]
    tried = [(mistake, {n: asked.best(begins[n], mistake) for n in few}) for mistake in every]

    def gain(found: Mapping[int, Match]) -> float:
        return sum(found.values(), Match()).gain(sum((base[n] for n in found), Match()))

    reach = max(max(gain(found) for _, found in tried) - NEAR, HALF / 2)
    best: dict[Cause, tuple[float, str, Match]] = {}
    for mistake, found in tried:
        if gain(found) < reach:
            continue
        whole = found | {n: asked.best(begins[n], mistake) for n in base if n not in found}
        share, (most, name, match) = gain(whole), best.get(mistake.cause, (0.0, "", Match()))
        if share > most:
            best[mistake.cause] = share, mistake.name, sum(whole.values(), Match())
        elif name and share == most:  # no step tells the two apart
            best[mistake.cause] = most, f"{name} or {mistake.name}", match
    suspects = list[Suspect]()
    ranked: list[tuple[Cause, tuple[float, str, Match]]] = sorted(best.items(), key=lambda item: -item[1][0])
    least = max([HALF, *(2 * share for _, (share, _, _) in ranked[1:2])])
    what = f"the {'drafter' if asked.drafter else 'target'}'s probabilities are reproduced with"
    where = f", where {plural(len(begins), 'request')} first differ" + "s" * (len(begins) == 1)
    visit = min((steps[-1].visit for steps in begins), key=lambda visit: (visit.record.step, visit.row))
    for place, (cause, (share, name, match)) in enumerate(ranked):
        if share >= HALF and (match.given(right) >= NEARLY or (not place and share >= least)):
            of = right.differ or right.total  # rounding hides which differ
            line = f"{what} {name} at {match} parents, without it at {right}{where}"
            counts = min(max(round(share * of), 0), of), of
            suspects.append(Suspect(cause, Proof.ROWS, (line,), visit.reference(), *counts, rerun=True))
    if suspects or asked.first or not asked.drafter:
        return suspects
    return _explained(replace(asked, first=True), known, first)  # later passes may read what the first one wrote


REDRAWN = 12  # whose draws are done again
FEWEST_DRAWS = 20  # draws: fewer say nothing
FREQUENT = 0.05  # of the draws: fewer are no sign
BORDER = 2e-3  # a coin so near to another token's part of the sum may have drawn that token
HOPELESS = 0.25  # where rounding may move that border by more, a draw says nothing


def shared_noise(session: JudgedCase) -> list[Suspect]:
    """Recovered tokens, and masses, that do not follow from the residual."""
    case, run = session.case, session.case.history.run
    steps = [
        step
        for step in case.drafting
        if len(step.rejected_last) and step.is_sampled and step.params is not None and not step.params.greedy
        if step.verdict.rule == STANDARD  # other rules leave something else of p
    ]
    if run is None or not run.is_ours or session.options.draft is None or len(steps) < FEWEST_DRAWS:
        return []
    names = list(dict.fromkeys(step.request for step in steps))
    chosen = {*names[:: max(1, len(names) // REDRAWN)][:REDRAWN]}
    steps = [step for step in steps if step.request in chosen]
    total, others, masses, likeliest = 0, list[Step](), list[Step](), list[float]()
    of_p, of_q = (_rows(case, session.models, what, steps) for what in "pq")
    allowed = max(LEAST, 2 * ROUNDING.get(run.dtype, ROUNDING["bfloat16"]))
    for step in steps:
        p, q, token = of_p.get(step.key, {}), of_q.get(step.key, {}), step.verdict.token
        if not {ROOT, *step.verdict.path.tolist()} <= p.keys() & q.keys():
            continue
        found = decide(step.verdict, step.tree, p, q)
        mass = min((figure.right for figure in found.figures if figure.what == "residual_mass"), default=1.0)
        rounding = ROUNDING.get(run.dtype, ROUNDING["bfloat16"]) / max(mass, 1e-9) ** len(step.rejected_last)
        decided = all(not figure.differs for figure in found.figures if figure.what in ("outcome", "kind"))
        off = max((figure.error for figure in found.figures if figure.what == "residual_mass"), default=0.0)
        masses += [step] if decided and off > max(allowed, rounding) else []
        if found.left is None or not decided or rounding >= HOPELESS or found.left.value[token] < 1e-9:
            continue  # what could not be drawn at all has another cause
        (low, high), border, total = interval_of(found.left.value, token), max(rounding, BORDER), total + 1
        others += [] if low - border <= step.verdict.final_coin <= high + border else [step]
        top = found.left.value >= found.left.value.max() - rounding
        likeliest += [min(float(found.left.value[top].sum()), 1.0)] if top[token] else []
    if len(masses) > max(2, FREQUENT * len(steps)):
        count = f"{len(masses):,} of {plural(len(steps), 'step')}"
        line = f"the recorded mass of the residual is not that of max(p - q, 0) in {count} with a recovered token"
        counts, at = (len(masses), len(masses)), masses[0].reference()
        return [Suspect(Cause.RESIDUAL_NOT_RENORMALISED, Proof.ROWS, (line,), at, *counts, rerun=True)]
    if len(others) <= max(2, FREQUENT * total):
        return []
    if len(likeliest) == total and math.fsum(map(math.log, likeliest)) <= LOG_CHANCE:
        line = f"the recovered token is the residual's likeliest in all of {total:,} draws: no coin draws it"
        return [Suspect(Cause.FINAL_NOT_RESIDUAL, Proof.ROWS, (line,), example=others[0].reference(), rerun=True)]
    line = f"the recorded coin draws another token from the residual in {len(others):,} of {total:,} draws"
    return [Suspect(Cause.COINS, Proof.ROWS, (line,), example=others[0].reference(), rerun=True)]


def _rows(case: Case, models: Models, what: str, steps: Sequence[Step]) -> dict[tuple[str, int], dict[int, Doubles]]:
    """By request and step, the distribution at every row."""
    asked, made = rows_of(case, models, what, steps), defaultdict[tuple[str, int], dict[int, Doubles]](dict)
    usable = [one for one in asked if one.logits and not one.contexts.limits and not one.contexts.params.limited]
    rows = RuledRows(Places(usable), what, None)
    of_places = rows.distributions(RIGHT, range(len(rows.places.every))).double().numpy() if usable else ()
    for place, row in zip(rows.places.every, of_places, strict=True):
        made[place.asked.step.key][place.node] = row
    return made
