"""The verdict located: which p, q, coin and comparison explain each outcome, and what each final token was drawn from.

Three questions, each over what the one before found right: whether trials read their own p and q; whether outcomes
follow from them and from the coin; whether the final token follows from what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.rerun.models import Models
from specscope.analyze.diagnose.rerun.rows import Asked, around, of_head, of_model
from specscope.analyze.diagnose.together import OF_FINALS
from specscope.analyze.findings import Reference
from specscope.analyze.locate.located import Located, Operation, Stage
from specscope.analyze.locate.model.code import code_of
from specscope.analyze.locate.model.other_rows import OTHERS, Places
from specscope.analyze.locate.model.sampling import RIGHT, RuledRows
from specscope.analyze.locate.model.search import Item, Search
from specscope.analyze.locate.model.variants import NODE, ROWS, RuleChange, knob
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import ROOT, Drawn

STEPS = 24  # that are asked about
ENOUGH = 4  # decisions that an explanation must explain
NEARLY = 0.96  # of all that were tried: rounding may turn one
BORDER = 2e-3  # a coin so near to another token's part of the sum may have drawn that token
POWERS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.25, 1.5, 2.0, 3.0, 4.0)  # p at another temperature, or at it twice
Array = NDArray[np.float64]
Value = Callable[[Step, int], "float | None"]  # of a step's node
Key = tuple[str, int]


@dataclass(frozen=True)
class TriedNode:
    """A node that was tried."""

    step: Step
    parent: int
    child: int
    first: bool  # whether no sibling was tried before it

    @property
    def where(self) -> Reference:
        """Where it is."""
        return self.step.reference(self.child)

    @property
    def key(self) -> tuple[str, int, int]:
        """Its request, step and node."""
        return (*self.step.key, self.child)


def located_verdicts(case: Case, audit: Audit, models: Models) -> list[Located]:
    """What the verdict takes in place of its own p, q, coin or residual. Empty where every outcome follows from them.

    Raises UserError where a model cannot be loaded.
    """
    steps = [step for step in case.drafting if step.part.rule == STANDARD]
    trials = [*_trials(steps)]
    located = [*_reads(case, audit, models, trials)]
    located += _outcomes(case, audit, models, trials)
    return located or _finals(case, audit, models)


def _trials(steps: Sequence[Step]) -> Iterator[TriedNode]:
    for step in steps:
        for trials in step.trials:
            for place, node in enumerate(trials.nodes):
                yield TriedNode(step, trials.parent, node, not place)


# What trials read


def _reads(case: Case, audit: Audit, models: Models, trials: Sequence[TriedNode]) -> Iterator[Located]:
    """Whether the p and q of first trials are those of their own node."""
    firsts = [trial for trial in trials if trial.first]
    for what, read, of in (("p", _p_trial, _p), ("q", _q_trial, _q)):
        pairs = [(trial, read(trial.step, trial.child), of(trial.step, trial.child)) for trial in firsts]
        known = [(trial, value, due) for trial, value, due in pairs if value is not None and due is not None]
        wrong = [trial for trial, value, due in known if abs(value - due) > 1e-6 + 1e-4 * due]
        if len(wrong) >= ENOUGH:
            yield from _read_of(case, audit, models, what, wrong, [trial for trial, _, _ in known])


def _p(step: Step, node: int) -> float | None:
    return float(step.verdict.p[node]) if step.verdict.tells_p else None


def _q(step: Step, node: int) -> float | None:
    return float(step.tree.q[node]) if step.tree.drawn[node] != Drawn.DETERMINISTIC else None


def _p_trial(step: Step, node: int) -> float | None:
    return float(step.verdict.p_trial[node]) if step.verdict.tells_p else None


def _q_trial(step: Step, node: int) -> float | None:
    return float(step.verdict.q_trial[node]) if step.verdict.tells_p else None


def _elsewhere(case: Case, of: Value) -> dict[str, Value]:
    """The same quantity of another node, step or request, as the capture has it."""
    beside: dict[int, list[Step]] = {}
    for step in sorted(case.steps, key=lambda step: step.visit.row):
        beside.setdefault(step.visit.record.step, []).append(step)

    def before(step: Step, node: int) -> float | None:
        last = step.last
        return of(last, node) if last is not None and node < len(last.tree) else None

    def neighbour(by: int) -> Value:
        def value(step: Step, node: int) -> float | None:
            batch = beside[step.visit.record.step]
            other = batch[(batch.index(step) + by) % len(batch)]
            return of(other, node) if other is not step and node < len(other.tree) else None

        return value

    def further(by: int) -> Value:
        return lambda step, node: of(step, node + by) if 0 <= node + by < len(step.tree) else None

    return {
        "the same node of the step before": before,
        "the next request of the batch": neighbour(1),
        "the request before it in the batch": neighbour(-1),
        "the next node": further(1),
        "the node before": further(-1),
    }


def _read_of(
    case: Case, audit: Audit, models: Models, what: str, wrong: Sequence[TriedNode], known: Sequence[TriedNode]
) -> Iterator[Located]:
    """Whose p or q it is: 1, a value of elsewhere in the capture, or the token's in another row of the model."""
    read, of = (_p_trial, _p) if what == "p" else (_q_trial, _q)
    values: dict[str, Value] = {"1 in place of it": lambda step, node: 1.0}
    values |= {f"the {what} of {name}, for its token": value for name, value in _elsewhere(case, of).items()}
    counts = {
        name: sum(_is_same(value(trial.step, trial.child), read(trial.step, trial.child)) for trial in wrong)
        for name, value in values.items()
    }
    name, count = max(counts.items(), key=lambda pair: pair[1])
    tried, runner_up, least = len(counts), "", NEARLY * len(wrong)
    if count < least:
        search = _rows(case, audit, models, what, wrong, known, read)
        answer = None if search is None else search.answer()
        if answer is None:
            return
        name, count, tried = answer.best.variant.name, answer.best.explained, answer.tried
        total = answer.wrong
        if answer.runner_up is not None:
            runner_up = f"{answer.runner_up.variant.name} leaves {total - answer.runner_up.explained:,} of {total:,}"
    else:
        total = len(wrong)
    trial = wrong[0]
    value, due = read(trial.step, trial.child), of(trial.step, trial.child)
    yield Located(
        Operation(Stage.VERDICT, what, f"the {what} that a draft is judged by", code_of(case.history.run, what)),
        f"drafts are judged by another {what} than their own: with {name} it comes out as recorded at {count:,} of "
        f"{plural(total, 'first trial')} at which it differs ({plural(tried, 'explanation')} tried)",
        looks=name,
        smallest=f"token {int(trial.step.tree.token[trial.child])} at {trial.where}: {what} {due:.6g}, judged by "
        f"{value:.6g}",
        where=trial.where,
        explained=count,
        differing=total,
        unit="first trial",
        runner_up=runner_up,
    )


def _is_same(value: float | None, other: float | None) -> bool:
    return value is not None and other is not None and abs(value - other) <= 1e-6 + 1e-4 * abs(other)


def _ask(case: Case, models: Models, what: str, steps: Sequence[Step]) -> list[Asked]:
    """The rows of the target, or of the drafter where that is a model that drew."""
    if what == "p":
        return of_model(models.target)(case, steps)
    run = case.history.run
    if models.options.draft is None or run is None:
        return []
    if model_part(run.drafter) == "eagle":
        return of_head(models.head, models.target)(case, steps)
    return of_model(models.draft)(case, steps)


def _rows(
    case: Case,
    audit: Audit,
    models: Models,
    what: str,
    wrong: Sequence[TriedNode],
    known: Sequence[TriedNode],
    read: Value,
) -> Search | None:
    """A search over first trials: what was read of each, by its own row and by others."""
    keys = list(dict.fromkeys(trial.step.key for trial in wrong))
    keys = keys[:: max(1, len(keys) // STEPS)][:STEPS]
    every = _ask(case, models, what, around(case, keys))
    every = [asked for asked in every if asked.logits and not asked.contexts.limits]
    if not every:
        return None
    rows = RuledRows(Places(every), what, None)
    bad, chosen = {trial.key for trial in wrong}, set(keys)
    items = [
        item
        for trial in known
        if trial.step.key in chosen and (item := _item(rows, audit, what, trial, read, wrong=trial.key in bad))
    ]
    return Search(rows, items, logits_right=True) if items else None


def _item(rows: RuledRows, audit: Audit, what: str, trial: TriedNode, read: Value, *, wrong: bool) -> Item | None:
    asked = next((one for one in rows.places.asked if one.step.key == trial.step.key), None)
    place = None if asked is None else rows.places.at(asked, trial.parent)
    value = read(trial.step, trial.child)
    if place is None or value is None:
        return None
    number = rows.places.number(place)
    params, token = rows.params[number], int(trial.step.tree.token[trial.child])
    slack = (audit.slack if what == "p" else audit.draft_slack) / (1.0 if params.greedy else params.temperature)
    greedy = params.greedy and what == "p"
    return Item(
        number, token, value, NODE, trial.where, wrong, max(slack, 4e-5), trial.parent, trial.child, greedy=greedy
    )


# What the outcomes follow from


@dataclass(frozen=True)
class DecisionPart:
    """One thing that goes into a decision: its values for all trials, NaN where there is none."""

    axis: str  # "p", "q", "coin", "acceptance"
    name: str
    values: Array


Accepts = Callable[[Array, Array, Array], NDArray[np.bool_]]  # of p, q and the coin
TESTS: dict[str, Accepts] = {
    "the coin below p / q": lambda p, q, coin: coin * q < p,
    "the coin below q / p": lambda p, q, coin: coin * p < q,
    "the coin not below p / q": lambda p, q, coin: coin * q >= p,
    "the coin at most q": lambda p, q, coin: coin <= q,
    "p / q above 1/2 whatever the coin": lambda p, q, coin: p > 0.5 * q,
    "p above q whatever the coin": lambda p, q, coin: p > q,
    "every draft accepted": lambda p, q, coin: np.ones(len(p), np.bool_),
    "every draft rejected": lambda p, q, coin: np.zeros(len(p), np.bool_),
}


@dataclass(frozen=True)
class DecidedBy:
    """One way in which the outcomes may come about."""

    changed: tuple[tuple[str, str], ...]  # (axis, name) of what is not as it should be
    explained: int  # of the wrong ones that it can decide
    looked: int  # wrong ones that it can decide
    fits: int
    total: int


def _outcomes(case: Case, audit: Audit, models: Models, trials: Sequence[TriedNode]) -> list[Located]:
    """Which p, q, coin and comparison give the outcomes of drafts that were decided against their own."""
    wrong = {trial.key for trial in trials if _is_against(trial)}
    if len(wrong) < ENOUGH:
        return []
    keys = sorted({(request, index) for request, index, _ in wrong})
    chosen = set(keys[:: max(1, len(keys) // STEPS)][:STEPS])
    here = [trial for trial in trials if trial.step.key in chosen]
    if not here:
        return []
    axes = [*_recorded_parts(case, here), *_other_rows(case, audit, models, here)]
    decisions = [*_decisions(here, wrong, axes)]
    good = [
        decision
        for decision in decisions
        if decision.changed
        and decision.explained >= ENOUGH
        and decision.explained > NEARLY * decision.looked
        and decision.fits > NEARLY * decision.total
    ]
    if not good:
        return []
    best = max(good, key=lambda decision: (decision.fits - 2 * len(decision.changed), decision.explained))
    second = max(
        (decision for decision in decisions if decision.changed and decision is not best),
        key=lambda decision: decision.explained - (decision.total - decision.fits),
        default=None,
    )
    example = next(trial for trial in here if trial.key in wrong)
    name = " and ".join(words for _, words in best.changed)
    operation = " and ".join(axis for axis, _ in best.changed)
    verdict, node = example.step.verdict, example.child
    return [
        Located(
            Operation(
                Stage.VERDICT, operation, "whether a draft is accepted", code_of(case.history.run, best.changed[0][0])
            ),
            f"{best.explained:,} of {plural(best.looked, 'draft')} that are decided against their own p follow from "
            f"{name}, and so do {best.fits:,} of all {best.total:,} that it could decide "
            f"({plural(len(decisions), 'combination')} tried)",
            looks=name,
            smallest=f"token {int(example.step.tree.token[node])} at {example.where}: p {verdict.p_trial[node]:.6g}, q "
            f"{verdict.q_trial[node]:.6g}, coin {verdict.coin[node]:.6g}, "
            f"{Outcome(int(verdict.outcome[node])).name.lower()}",
            where=example.where,
            explained=best.explained,
            differing=best.looked,
            unit="draft",
            runner_up=""
            if second is None
            else f"{' and '.join(words for _, words in second.changed)} leaves {second.looked - second.explained:,} of "
            f"{second.looked:,}",
        )
    ]


def _is_against(trial: TriedNode) -> bool:
    """Whether a draft was decided against its own p, q and coin, by more than rounding."""
    verdict, node = trial.step.verdict, trial.child
    if not verdict.tells_p or (verdict.coin[node] == 0 and not verdict.is_greedy):
        return False  # the engine tells no coin
    margin = float(verdict.p_trial[node]) - float(verdict.coin[node]) * float(verdict.q_trial[node])
    return abs(margin) > 1e-6 and (margin > 0) != (verdict.outcome[node] == Outcome.ACCEPTED)


def _recorded_parts(case: Case, trials: Sequence[TriedNode]) -> Iterator[DecisionPart]:
    """What the capture itself has: the right ones first."""

    def part(axis: str, name: str, value: Value) -> DecisionPart:
        values = [value(trial.step, trial.child) for trial in trials]
        return DecisionPart(axis, name, np.array([np.nan if x is None else x for x in values], np.float64))

    def coin(step: Step, node: int) -> float | None:
        return float(step.verdict.coin[node])

    yield part("p", "", lambda step, node: float(step.verdict.p_trial[node]))
    yield part("p", "its p before any sibling was rejected", _p)
    yield part("q", "", lambda step, node: float(step.verdict.q_trial[node]))
    yield part("q", "a q of 1", lambda step, node: 1.0)
    yield part("q", "its q before any sibling was rejected", lambda step, node: float(step.tree.q[node]))
    for name, value in _elsewhere(case, _q).items():
        yield part("q", f"the q of {name}", value)
    yield part("coin", "", coin)
    yield part("coin", "the coin of the final token", lambda step, node: float(step.verdict.final_coin))
    for name, value in _elsewhere(case, coin).items():
        yield part("coin", f"the coin of {name}", value)


def _other_rows(case: Case, audit: Audit, models: Models, trials: Sequence[TriedNode]) -> Iterator[DecisionPart]:
    """p, and q where it was drawn from, of other rows, and p at other temperatures: of first trials alone."""
    firsts = [trial for trial in trials if trial.first]
    for what, read in (("p", _p_trial), ("q", _q)):
        search = _rows(case, audit, models, what, firsts, firsts, read)
        if search is None:
            continue
        number = {trial.key: index for index, trial in enumerate(trials)}
        at = [number[item.where.request, item.where.index, item.child or 0] for item in search.items]
        made = [RuleChange(f"the {what} of {relation.name}", ROWS, row=relation) for relation in OTHERS]
        if what == "p":
            made += [RuleChange(f"its p to the power {x:g}", "p", knob("temperature", _colder(x))) for x in POWERS]
        for change in made:
            values = search.predicted((change,))
            own = np.array([_is_own(search, item, change) for item in search.items])
            values = np.where(search.greedy, (values > 0).astype(float), values)
            values[own] = np.nan
            whole = np.full(len(trials), np.nan)
            whole[at] = values
            yield DecisionPart(what, change.name, whole)


def _colder(power: float) -> Callable[[Tensor], Tensor]:
    return lambda temperature: temperature / power


def _is_own(search: Search, item: Item, change: RuleChange) -> bool:
    """Whether there is no other row of that relation."""
    return change.row is not None and search.rows.places.related(change.row, item.row, item.child) < 0


def _decisions(
    trials: Sequence[TriedNode], wrong: set[tuple[str, int, int]], parts: Sequence[DecisionPart]
) -> Iterator[DecidedBy]:
    """Every part that is not as it should be by itself, and every two of different axes."""
    right = {axis: next(part for part in parts if part.axis == axis) for axis in ("p", "q", "coin")}
    others = [part for part in parts if part.name]
    names = [name for name in TESTS if name != next(iter(TESTS))]
    accepted = np.array([trial.step.verdict.outcome[trial.child] == Outcome.ACCEPTED for trial in trials])
    is_wrong = np.array([trial.key in wrong for trial in trials])

    def decision(chosen: Sequence[DecisionPart], test: str) -> DecidedBy:
        values = {axis: part.values for axis, part in right.items()}
        values |= {part.axis: np.where(np.isnan(part.values), values[part.axis], part.values) for part in chosen}
        p, q, coin = (values[axis] for axis in ("p", "q", "coin"))
        known = ~np.isnan(p + q + coin)
        with np.errstate(invalid="ignore"):
            fits = TESTS[test or next(iter(TESTS))](p, q, coin) == accepted
        changed = [(part.axis, part.name) for part in chosen] + ([("acceptance", test)] if test else [])
        return DecidedBy(
            tuple(changed),
            int((fits & known & is_wrong).sum()),
            int((known & is_wrong).sum()),
            int((fits & known).sum()),
            int(known.sum()),
        )

    for part in others:
        yield decision([part], "")
    for test in names:
        yield decision([], test)
        for part in others:
            yield decision([part], test)
    for index, part in enumerate(others):
        for other in others[index + 1 :]:
            if other.axis != part.axis:
                yield decision([part, other], "")


# What the final tokens were drawn from


@dataclass(frozen=True)
class DrawnFrom:
    """A recovered token, and what it may have been drawn from [V] each; the residual first."""

    step: Step
    mass: float  # of the residual before it was divided
    drawn_from: dict[str, Tensor]


def _finals(case: Case, audit: Audit, models: Models) -> list[Located]:
    """Which distribution the recovered tokens were drawn from, where it is not the residual."""
    failed = {check.name for check in case.checks.values() if check.failed or check.result == "failed"}
    steps = [
        step
        for step in case.drafting
        if step.rejected_last and step.part.rule == STANDARD and step.params is not None and not step.params.greedy
    ]
    if not failed & {*OF_FINALS} or not steps or not steps[0].verdict.tells_p:
        return []
    chosen = steps[:: max(1, len(steps) // (2 * STEPS))][: 2 * STEPS]
    left = [*_left(case, models, chosen)]
    if not left:
        return []
    fits = {
        name: np.array([_fits(one, one.drawn_from.get(name), audit.slack, case) for one in left])
        for name in dict.fromkeys(name for one in left for name in one.drawn_from)
    }
    residual = next(iter(fits))
    wrong = ~fits[residual]
    if wrong.sum() < ENOUGH:
        return []
    others = sorted(fits, key=lambda name: -int(fits[name].sum()))
    best = next(name for name in others if name != residual)
    second = next((name for name in others if name not in (residual, best)), "")
    explained, total = int((fits[best] & wrong).sum()), int(wrong.sum())
    if explained < NEARLY * total or fits[best].sum() < 0.9 * len(left):
        return []
    example = left[int(np.flatnonzero(wrong)[0])]
    token, verdict = example.step.verdict.token, example.step.verdict
    figures = f"{float(example.drawn_from[residual][token]):.6g} in the residual"
    return [
        Located(
            Operation(
                Stage.VERDICT,
                "final draw",
                "what the recovered token is drawn from",
                code_of(case.history.run, "final draw"),
            ),
            f"recovered tokens are drawn from {best}, not from the residual: {explained:,} of "
            f"{plural(total, 'token')} whose p or coin does not fit the residual fit it, and {int(fits[best].sum()):,} "
            f"of all {len(left):,} ({plural(len(fits), 'distribution')} tried)",
            looks=best,
            smallest=f"token {token} at {example.step.reference()}: p {verdict.final_p:.6g} recorded, {figures}, "
            f"{float(example.drawn_from[best][token]):.6g} in this; coin {verdict.final_coin:.6g}",
            where=example.step.reference(),
            explained=explained,
            differing=total,
            unit="token",
            runner_up=f"{second} leaves {total - int((fits[second] & wrong).sum()):,} of {total:,}" if second else "",
        )
    ]


def _left(case: Case, models: Models, steps: Sequence[Step]) -> Iterator[DrawnFrom]:
    """What the recovered tokens of steps may have been drawn from."""
    sampled = any(step.is_sampled for step in steps)
    of_p = _made(_ask(case, models, "p", steps), "p")
    of_q = _made(_ask(case, models, "q", steps), "q") if sampled else {}
    for step in steps:
        path = step.verdict.path
        leaf = int(path[-1]) if len(path) else ROOT
        p, q = of_p.get((step.key, leaf)), of_q.get((step.key, leaf))
        if p is None or (q is None and step.tree.drawn[step.rejected_last[0]] != Drawn.DETERMINISTIC):
            continue
        rest, once, mass, own_q, left_q = p, p, 1.0, q, q
        without = p.clone()
        for place, child in enumerate(step.rejected_last):
            token = int(step.tree.token[child])
            without[token] = 0
            rest, share = _rejected(rest, own_q, token)
            mass = min(mass, share)
            once, left_q = rest if not place else once, own_q
            if own_q is not None and step.tree.drawn[child] == Drawn.WITHOUT_REPLACEMENT:
                own_q = own_q.clone()
                own_q[token] = 0
                own_q /= own_q.sum().clamp(min=1e-30)
        names = {"the residual": rest, "p as it was": p, "p without the rejected tokens": without / without.sum()}
        if q is not None:
            names["q"] = q
        if left_q is not None and len(step.rejected_last) > 1:
            names["what is left of q"] = left_q
        if len(step.rejected_last) > 1:
            names["the residual of the first trial alone"] = once
        for name, node in (("p of the root", ROOT), ("p of the row above", _above(step, leaf))):
            other = of_p.get((step.key, node))
            if node != leaf and other is not None:
                names[name] = other
        yield DrawnFrom(step, mass, names)


def _above(step: Step, leaf: int) -> int:
    return ROOT if leaf == ROOT else int(step.tree.parent[leaf])


def _rejected(p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, float]:
    left = p.clone()
    if q is None:
        left[token] = 0
    else:
        left = (p - q).clamp(min=0)
    mass = float(left.sum())
    return (left / mass, mass) if mass > 0 else (p, 1.0)


def _made(asked: Sequence[Asked], what: str) -> dict[tuple[Key, int], Tensor]:
    """The distribution at every row that was asked for, by step and node."""
    usable = [one for one in asked if one.logits and not one.contexts.limits]
    if not usable:
        return {}
    rows = RuledRows(Places(usable), what, None)
    made = rows.distributions(RIGHT, range(len(rows.places.every))).double()
    return {(place.asked.step.key, place.node): row for place, row in zip(rows.places.every, made, strict=True)}


def _fits(left: DrawnFrom, p: Tensor | None, slack: float, case: Case) -> bool:
    """Whether the recorded p of the final token, and in our own runs its coin, are those of a distribution."""
    verdict = left.step.verdict
    if p is None:
        return False
    value, mass = float(p[verdict.token]), max(left.mass, 1e-3)
    allowed = 4e-6 + (slack + 4e-5) / mass * max(value, verdict.final_p)
    run = case.history.run
    if run is None or not run.is_ours:
        return abs(value - verdict.final_p) <= allowed
    ends = p.cumsum(0)
    below, above, border = float(ends[verdict.token]) - value, float(ends[verdict.token]), max(BORDER, slack / mass)
    return abs(value - verdict.final_p) <= allowed and below - border <= verdict.final_coin <= above + border
