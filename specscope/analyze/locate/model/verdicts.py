"""The verdict located: which p, q, coin and comparison explain each outcome, and what each final token was drawn from.

Three questions, each over what the one before found right: whether trials read their own p and q; whether outcomes
follow from them and from the coin; whether the final token follows from what was left. Figures that these leave, and
that are not their formula's, follow where something known stands in place of the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.rerun.models import Models
from specscope.analyze.diagnose.rerun.rows import around
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.locate.code import code_of
from specscope.analyze.locate.formulas import located_formulas
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.locate.model.finals import located_finals, rows_of
from specscope.analyze.locate.model.other_rows import OTHERS, Places
from specscope.analyze.locate.model.sampling import RuledRows
from specscope.analyze.locate.model.search import Item, Search
from specscope.analyze.locate.model.variants import NODE, ROWS, RuleChange, knob
from specscope.trace.history.wording import plural
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import ROOT, Bools, Doubles

STEPS = 24  # that are asked about
ENOUGH = 4  # decisions that an explanation must explain
NEARLY = 0.96  # of all that were tried: rounding may turn one
POWERS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.25, 1.5, 2.0, 3.0, 4.0)  # p at another temperature, or at it twice


@dataclass(frozen=True)
class Trials:
    """The nodes that were tried under the standard rule, and the models that may be asked about them."""

    case: Case
    audit: Audit
    models: Models
    nodes: Indices  # over all of the run
    firsts: Indices  # those before which no sibling was tried

    @property
    def c(self) -> Columns:
        """What is recorded."""
        return self.case.evidence

    def place(self, name: str, words: str) -> Operation:
        """An operation of the verdict; several are joined by "and"."""
        return Operation(Stage.VERDICT, name, words, code_of(self.case.history.run, name.split(" and ")[0]))


def located_verdicts(case: Case, audit: Audit, models: Models) -> list[Located]:
    """What the verdict takes in place of its own p, q, coin or residual. Empty where every outcome follows from them.

    Raises UserError where a model cannot be loaded.
    """
    c = case.evidence
    judged = np.array(
        [part.rule == STANDARD and not len(verdict.forced) for part, verdict in zip(c.parts, c.verdicts, strict=True)]
    )
    nodes = np.flatnonzero(c.tried & (judged & c.told)[c.step]) if len(c.token) else np.zeros(0, np.int64)
    firsts = nodes[np.unique(c.row[nodes], return_index=True)[1]]
    trials = Trials(case, audit, models, nodes, np.sort(firsts))
    located = [*_reads(trials)]
    located += _outcomes(trials)
    located = located or located_finals(case, audit, models)
    return located or [item for item in located_formulas(case) if item.looks]


# What trials read


def _reads(trials: Trials) -> Iterator[Located]:
    """Whether the p and q of first trials are those of their own node."""
    c, firsts = trials.c, trials.firsts
    for what, read, own, known in (
        ("p", c.p_trial, c.p, firsts),
        ("q", c.q_trial, c.q, firsts[c.sampled[firsts]]),
    ):
        wrong = known[~_same(read[known], own[known])]
        if len(wrong) >= ENOUGH:
            yield from _read_of(trials, what, read, own, wrong, known)


def _same(values: Doubles, others: Doubles) -> Bools:
    return np.asarray(np.abs(values - others) <= 1e-6 + 1e-4 * np.abs(others))


def _elsewhere(c: Columns) -> dict[str, Indices]:
    """[N] by what it is to a node: a node of the step before, another request or the same tree; -1 where none."""
    node, count = np.arange(len(c.token)), np.diff(c.start)
    beside: dict[int, list[int]] = {}
    for step, visit in sorted(enumerate(c.visits), key=lambda pair: pair[1].row):
        beside.setdefault(visit.record.step, []).append(step)
    last, before = dict[str, int](), np.full(len(c), -1)
    for step, visit in enumerate(c.visits):
        before[step] = last.get(visit.request.id, -1)
        last[visit.request.id] = step

    def of_step(other: Indices) -> Indices:
        """The node of the same number in another step."""
        there = other[c.step]
        fits = (there >= 0) & (c.node < np.where(there >= 0, count[there], 0))
        return np.where(fits, c.start[there] + c.node, -1)

    def neighbour(by: int) -> Indices:
        other = np.full(len(c), -1)
        for batch in beside.values():
            for place, step in enumerate(batch):
                there = batch[(place + by) % len(batch)]
                other[step] = there if there != step else -1
        return of_step(other)

    def further(by: int) -> Indices:
        there = np.clip(node + by, 0, max(len(node) - 1, 0))
        return np.where((there == node + by) & (c.step[there] == c.step), there, -1)

    return {
        "the same node of the step before": of_step(before),
        "the next request of the batch": neighbour(1),
        "the request before it in the batch": neighbour(-1),
        "the next node": further(1),
        "the node before": further(-1),
    }


def _at(values: Doubles, places: Indices) -> Doubles:
    """The values of these nodes; NaN for none."""
    return np.where(places >= 0, values[places], np.nan)


def _read_of(
    trials: Trials, what: str, read: Doubles, own: Doubles, wrong: Indices, known: Indices
) -> Iterator[Located]:
    """Whose p or q it is: 1, a value of elsewhere in the capture, or the token's in another row of the model."""
    c = trials.c
    values = {"1 in place of it": np.ones(len(own))}
    values |= {f"the {what} of {name}, for its token": _at(own, there) for name, there in _elsewhere(c).items()}
    counts = {name: int(_same(value[wrong], read[wrong]).sum()) for name, value in values.items()}
    name, count = max(counts.items(), key=lambda pair: pair[1])
    tried, runner_up, total = len(counts), "", len(wrong)
    if count < NEARLY * total:
        search = _rows(trials, what, read, wrong, known)
        answer = None if search is None else search.answer()
        if answer is None:
            return
        name, count, tried, total = answer.best.variant.name, answer.best.explained, answer.tried, answer.wrong
        if answer.runner_up is not None:
            runner_up = f"{answer.runner_up.variant.name} leaves {total - answer.runner_up.explained:,} of {total:,}"
    node = int(wrong[0])
    yield Located(
        trials.place(what, f"the {what} that a draft is judged by"),
        f"drafts are judged by another {what} than their own: with {name} it comes out as recorded at {count:,} of "
        f"{plural(total, 'first trial')} at which it differs ({plural(tried, 'explanation')} tried)",
        looks=name,
        smallest=f"token {c.token[node]} at {c.at_node(node)}: {what} {own[node]:.6g}, judged by {read[node]:.6g}",
        where=c.at_node(node),
        explained=count,
        differing=total,
        unit="first trial",
        runner_up=runner_up,
        proof=Proof.ROWS,
    )


def _keys(c: Columns, nodes: Indices) -> list[tuple[str, int]]:
    """Some of the steps of nodes, by request and number, spread over the run."""
    steps = list(dict.fromkeys(c.step[nodes].tolist()))
    some = steps[:: max(1, len(steps) // STEPS)][:STEPS]
    return [(c.visits[step].request.id, c.visits[step].part.index) for step in some]


def _rows(trials: Trials, what: str, read: Doubles, wrong: Indices, known: Indices) -> Search | None:
    """A search over first trials: what was read of each, by its own row and by others."""
    c, keys = trials.c, _keys(trials.c, wrong)
    every = rows_of(trials.case, trials.models, what, around(trials.case, keys))
    every = [asked for asked in every if asked.logits and not asked.contexts.limits]
    if not every:
        return None
    rows, chosen, items = RuledRows(Places(every), what, None), set(keys), list[Item]()
    by_key, bad = {asked.step.key: asked for asked in every}, set(wrong.tolist())
    for node in known.tolist():
        where = c.at_node(node)
        asked = by_key.get((where.request, where.index)) if (where.request, where.index) in chosen else None
        parent = ROOT if c.above[node] < 0 else int(c.node[c.above[node]])
        place = None if asked is None else rows.places.at(asked, parent)
        if place is None:
            continue
        number = rows.places.number(place)
        params = rows.params[number]
        slack = (trials.audit.slack if what == "p" else trials.audit.draft_slack) / (
            1.0 if params.greedy else params.temperature
        )
        item = Item(number, int(c.token[node]), float(read[node]), NODE, where, node in bad, max(slack, 4e-5), parent)
        items.append(replace(item, child=int(c.node[node]), greedy=params.greedy and what == "p"))
    return Search(rows, items, logits_right=True) if items else None


# What the outcomes follow from


@dataclass(frozen=True)
class DecisionPart:
    """One thing that goes into a decision: its values for all trials, NaN where there is none."""

    axis: str  # "p", "q", "coin", "acceptance"
    name: str
    values: Doubles


Accepts = Callable[[Doubles, Doubles, Doubles], Bools]  # of p, q and the coin
RIGHT = "the coin below p / q"
TESTS: dict[str, Accepts] = {
    RIGHT: lambda p, q, coin: coin * q < p,
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

    @property
    def name(self) -> str:
        """In words."""
        return " and ".join(words for _, words in self.changed)

    @property
    def spoiled(self) -> int:
        """Right ones that would be wrong by it."""
        return (self.total - self.fits) - (self.looked - self.explained)


def _outcomes(trials: Trials) -> list[Located]:
    """Which p, q, coin and comparison give the outcomes of drafts that were decided against their own."""
    c, nodes = trials.c, trials.nodes
    margin = c.p_trial - c.coin * c.q_trial
    known = (c.coin != 0) | c.greedy[c.step]  # else the engine tells no coin
    against = known & (np.abs(margin) > 1e-6) & ((margin > 0) != c.accepted)  # by more than rounding
    wrong = nodes[against[nodes]]
    if len(wrong) < ENOUGH:
        return []
    chosen = set(_keys(c, wrong))
    visits = c.visits
    here = nodes[[(visits[s].request.id, visits[s].part.index) in chosen for s in c.step[nodes].tolist()]]
    parts = [*_recorded_parts(c, here), *_other_rows(trials, here)]
    decisions = [*_decisions(c.accepted[here], against[here], parts)]
    good = [
        way
        for way in decisions
        if way.explained >= ENOUGH and way.explained > NEARLY * way.looked and way.fits > NEARLY * way.total
    ]
    if not good:
        return []
    best = max(good, key=lambda way: (way.fits - 2 * len(way.changed), way.explained))
    others = [way for way in decisions if way is not best]
    second = max(others, key=lambda way: way.explained - (way.total - way.fits), default=None)
    node = int(here[against[here]][0])
    figures = f"p {c.p_trial[node]:.6g}, q {c.q_trial[node]:.6g}, coin {c.coin[node]:.6g}"
    return [
        Located(
            trials.place(" and ".join(axis for axis, _ in best.changed), "whether a draft is accepted"),
            f"{best.explained:,} of {plural(best.looked, 'draft')} that are decided against their own p follow from "
            f"{best.name}, and so do {best.fits:,} of all {best.total:,} that it could decide "
            f"({plural(len(decisions), 'combination')} tried)",
            looks=best.name,
            smallest=f"token {c.token[node]} at {c.at_node(node)}: {figures}, "
            f"{Outcome(int(c.outcome[node])).name.lower()}",
            where=c.at_node(node),
            explained=best.explained,
            differing=best.looked,
            unit="draft",
            runner_up=""
            if second is None
            else f"{second.name} leaves {second.looked - second.explained:,} of {second.looked:,}",
            spoiled=best.spoiled,
            proof=Proof.ROWS,
        )
    ]


def _recorded_parts(c: Columns, here: Indices) -> Iterator[DecisionPart]:
    """What the capture itself has: the right ones first."""
    elsewhere = {name: there[here] for name, there in _elsewhere(c).items()}
    yield DecisionPart("p", "", c.p_trial[here])
    yield DecisionPart("p", "its p before any sibling was rejected", c.p[here])
    yield DecisionPart("q", "", c.q_trial[here])
    yield DecisionPart("q", "a q of 1", np.ones(len(here)))
    yield DecisionPart("q", "its q before any sibling was rejected", c.q[here])
    q = np.where(c.sampled, c.q, np.nan)
    for name, there in elsewhere.items():
        yield DecisionPart("q", f"the q of {name}", _at(q, there))
    yield DecisionPart("coin", "", c.coin[here])
    yield DecisionPart("coin", "the coin of the final token", c.final_coin[c.step[here]])
    for name, there in elsewhere.items():
        yield DecisionPart("coin", f"the coin of {name}", _at(c.coin, there))


def _other_rows(trials: Trials, here: Indices) -> Iterator[DecisionPart]:
    """p, and q where it was drawn from, of other rows, and p at other temperatures: of first trials alone."""
    c = trials.c
    firsts = here[np.isin(here, trials.firsts)]
    for what, read, known in (("p", c.p_trial, firsts), ("q", c.q, firsts[c.sampled[firsts]])):
        search = _rows(trials, what, read, known, known) if len(known) else None
        if search is None:
            continue
        numbers = {(str(c.at_node(node))): place for place, node in enumerate(here.tolist())}
        at = [numbers[str(item.where)] for item in search.items]
        made = [RuleChange(f"the {what} of {relation.name}", ROWS, row=relation) for relation in OTHERS]
        if what == "p":
            made += [RuleChange(f"its p to the power {x:g}", "p", knob("temperature", _colder(x))) for x in POWERS]
        for change in made:
            values = search.predicted((change,))
            values = np.where(search.greedy, (values > 0).astype(float), values)
            values[[_is_own(search, item, change) for item in search.items]] = np.nan
            whole = np.full(len(here), np.nan)
            whole[at] = values
            yield DecisionPart(what, change.name, whole)


def _colder(power: float) -> Callable[[Tensor], Tensor]:
    return lambda temperature: temperature / power


def _is_own(search: Search, item: Item, change: RuleChange) -> bool:
    """Whether there is no other row of that relation."""
    return change.row is not None and search.rows.places.related(change.row, item.row, item.child) < 0


def _decisions(accepted: Bools, wrong: Bools, parts: Sequence[DecisionPart]) -> Iterator[DecidedBy]:
    """Every part that is not as it should be by itself, and every two of different axes."""
    right = {part.axis: part.values for part in parts if not part.name}
    others = [part for part in parts if part.name] + [
        DecisionPart("acceptance", name, np.zeros(len(accepted))) for name in TESTS if name != RIGHT
    ]

    def decision(chosen: Sequence[DecisionPart]) -> DecidedBy:
        values = right | {
            part.axis: np.where(np.isnan(part.values), right[part.axis], part.values)
            for part in chosen
            if part.axis in right
        }
        test = next((part.name for part in chosen if part.axis == "acceptance"), RIGHT)
        p, q, coin = (values[axis] for axis in ("p", "q", "coin"))
        known = ~np.isnan(p + q + coin)
        with np.errstate(invalid="ignore"):
            fits = (TESTS[test](p, q, coin) == accepted) & known
        changed = tuple((part.axis, part.name) for part in chosen)
        return DecidedBy(
            changed, int((fits & wrong).sum()), int((known & wrong).sum()), int(fits.sum()), int(known.sum())
        )

    for index, part in enumerate(others):
        yield decision([part])
        for other in others[index + 1 :]:
            if other.axis != part.axis:
                yield decision([part, other])
