"""The verdict located: which p, q, coin and comparison explain each outcome, and what each final token was drawn from.

Three questions, each over what the one before found right: whether trials read their own p and q; whether outcomes
follow from them and from the coin; whether the final token follows from what was left. Figures that these leave, and
that are not their formula's, follow where something known stands in place of the right one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rows import Models, around, rows_of
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.locate.decided import ACCEPTANCE
from specscope.analyze.locate.formulas import located_formulas
from specscope.analyze.locate.located import Located, Proof, Stage
from specscope.analyze.locate.model.finals import located_finals
from specscope.analyze.locate.model.other_rows import OTHERS, Places, some
from specscope.analyze.locate.model.sampling import ROWS, RuleChange, RuledRows, knob, times
from specscope.analyze.locate.model.search import Item, Search, item_at
from specscope.analyze.locate.operations import our_operation
from specscope.analyze.verify.case import Case
from specscope.trace.history.wording import plural
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import Bools, Doubles

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
    located = [*_reads(trials), *_outcomes(trials)]
    located = located or located_finals(case, audit, models)
    return located or [item for item in located_formulas(case) if item.looks]


# What may stand in place of a trial's own p, q or coin


def _elsewhere(c: Columns) -> dict[str, Indices]:
    """[N] by what it is to a node: a node of the step before, another request or the same tree; -1 where none."""
    last, batches = dict[str, int](), defaultdict[int, list[tuple[int, int]]](list)
    before, following, preceding = np.full((3, len(c)), -1)
    for step, visit in enumerate(c.visits):
        before[step] = last.get(visit.request.id, -1)
        last[visit.request.id] = step
        batches[visit.record.step].append((visit.row, step))
    for batch in (np.array(sorted(rows))[:, 1] for rows in batches.values() if len(rows) > 1):
        following[batch], preceding[batch] = np.roll(batch, -1), np.roll(batch, 1)
    node, count = np.arange(len(c.token)), np.diff(c.start)

    def of_step(other: Indices) -> Indices:
        """The node of the same number in another step."""
        there = other[c.step]
        return np.where((there >= 0) & (c.node < count[there]), c.start[there] + c.node, -1)

    def further(by: int) -> Indices:
        there = np.clip(node + by, 0, max(len(node) - 1, 0))
        return np.where((there == node + by) & (c.step[there] == c.step), there, -1)

    return {
        "the same node of the step before": of_step(before),
        "the next request of the batch": of_step(following),
        "the request before it in the batch": of_step(preceding),
        "the next node": further(1),
        "the node before": further(-1),
    }


def _instead(c: Columns) -> dict[str, dict[str, Doubles]]:
    """[N] what the capture has that may stand in place of p, q and coin; NaN where there is none."""
    known = {"p": c.p, "q": np.where(c.sampled, c.q, np.nan), "coin": c.coin}
    instead = {
        "p": {"its p before any sibling was rejected": c.p},
        "q": {"a q of 1": np.ones(len(c.q)), "its q before any sibling was rejected": c.q},
        "coin": {"the coin of the final token": c.final_coin[c.step]},
    }
    for name, there in _elsewhere(c).items():
        for axis, values in known.items():
            instead[axis][f"the {axis} of {name}, for its token"] = np.where(there >= 0, values[there], np.nan)
    return instead


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


def _read_of(
    trials: Trials, what: str, read: Doubles, own: Doubles, wrong: Indices, known: Indices
) -> Iterator[Located]:
    """Whose p or q it is: 1, a value of elsewhere in the capture, or the token's in another row of the model."""
    c, runner_up, total = trials.c, "", len(wrong)
    counts = {name: int(_same(values[wrong], read[wrong]).sum()) for name, values in _instead(c)[what].items()}
    name, tried = max(counts, key=lambda name: counts[name]), len(counts)
    count = counts[name]
    if count < NEARLY * total:
        search = _rows(trials, what, read, wrong, known)
        answer = None if search is None else search.answer()
        if answer is None:
            return
        name, count, tried, total = answer.best.variant.name, answer.best.explained, answer.tried, answer.wrong
        if answer.runner_up is not None:
            runner_up = f"{answer.runner_up.variant.name} leaves {total - answer.runner_up.explained:,} of {total:,}"
    node = int(wrong[0])
    where = c.at_node(node)
    sentence = (
        f"drafts are judged by another {what} than their own: with {name} it comes out as recorded at {count:,} of "
        f"{plural(total, 'first trial')} at which it differs ({plural(tried, 'explanation')} tried)"
    )
    smallest = f"token {c.token[node]} at {where}: {what} {own[node]:.6g}, judged by {read[node]:.6g}"
    operation = our_operation(trials.case.history.run, Stage.VERDICT, what, f"the {what} that a draft is judged by")
    counted = count, total, "first trial", True, runner_up
    yield Located(operation, sentence, name, smallest, where, *counted, proof=Proof.ROWS)


def _keys(c: Columns, nodes: Indices) -> list[tuple[str, int]]:
    """Some of the steps of nodes, by request and number, spread over the run."""
    steps = some(list(dict.fromkeys(c.step[nodes].tolist())))
    return [(c.visits[step].request.id, c.visits[step].part.index) for step in steps]


def _rows(trials: Trials, what: str, read: Doubles, wrong: Indices, known: Indices) -> Search | None:
    """A search over first trials: what was read of each, by its own row and by others."""
    c, keys = trials.c, _keys(trials.c, wrong)
    every = rows_of(trials.case, trials.models, what, around(trials.case, keys))
    every = [asked for asked in every if asked.logits and not asked.contexts.limits]
    if not every:
        return None
    rows, items = RuledRows(Places(every), what, None), list[Item]()
    by_key, bad = {asked.step.key: asked for asked in every if asked.step.key in set(keys)}, set(wrong.tolist())
    for node in known.tolist():
        where, parent = c.at_node(node), int(c.parent[node])
        asked = by_key.get((where.request, where.index))
        number = -1 if asked is None else rows.places.at(asked, parent)
        if number >= 0:
            item = item_at(rows, number, trials.audit, where)
            recorded, slack = float(read[node]), max(item.slack, 4e-5)
            here = replace(item, token=int(c.token[node]), recorded=recorded, wrong=node in bad, slack=slack)
            items.append(replace(here, child=int(c.node[node])))
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
    """One way in which the outcomes may come about: what is not as it should be, by axis."""

    changed: dict[str, str]
    explained: int  # of the wrong ones that it can decide
    looked: int  # wrong ones that it can decide
    fits: int
    total: int

    @property
    def name(self) -> str:
        """In words."""
        return " and ".join(self.changed.values())


def _outcomes(trials: Trials) -> list[Located]:
    """Which p, q, coin and comparison give the outcomes of drafts that were decided against their own."""
    c, nodes = trials.c, trials.nodes
    margin = c.p_trial - c.coin * c.q_trial
    known = (c.coin != 0) | c.greedy[c.step]  # else the engine tells no coin
    against = known & (np.abs(margin) > 1e-6) & ((margin > 0) != c.accepted)  # by more than rounding
    wrong = nodes[against[nodes]]
    if len(wrong) < ENOUGH:
        return []
    chosen, visits = set(_keys(c, wrong)), c.visits
    here = nodes[[(visits[s].request.id, visits[s].part.index) in chosen for s in c.step[nodes].tolist()]]
    ways = [*_ways(c, here, against[here], [*_other_rows(trials, here)])]
    good = [
        way
        for way in ways
        if way.explained >= ENOUGH and way.explained > NEARLY * way.looked and way.fits > NEARLY * way.total
    ]
    if not good:
        return []
    best = max(good, key=lambda way: (way.fits - 2 * len(way.changed), way.explained))
    second = max((way for way in ways if way is not best), key=lambda way: way.explained - (way.total - way.fits))
    node = int(here[against[here]][0])
    where, outcome = c.at_node(node), Outcome(int(c.outcome[node])).name.lower()
    sentence = (
        f"{best.explained:,} of {plural(best.looked, 'draft')} that are decided against their own p follow from "
        f"{best.name}, and so do {best.fits:,} of all {best.total:,} that it could decide "
        f"({plural(len(ways), 'combination')} tried)"
    )
    figures = f"p {c.p_trial[node]:.6g}, q {c.q_trial[node]:.6g}, coin {c.coin[node]:.6g}, {outcome}"
    smallest = f"token {c.token[node]} at {where}: {figures}"
    next_best = f"{second.name} leaves {second.looked - second.explained:,} of {second.looked:,}"
    name = " and ".join(best.changed)
    operation = our_operation(trials.case.history.run, Stage.VERDICT, name, "whether a draft is accepted")
    spoiled = (best.total - best.fits) - (best.looked - best.explained)
    counted = best.explained, best.looked, "draft", True, next_best, spoiled
    return [Located(operation, sentence, best.name, smallest, where, *counted, Proof.ROWS)]


def _other_rows(trials: Trials, here: Indices) -> Iterator[DecisionPart]:
    """p, and q where it was drawn from, of other rows, and p at other temperatures: of first trials alone."""
    c = trials.c
    firsts = here[np.isin(here, trials.firsts)]
    numbers = {str(c.at_node(node)): place for place, node in enumerate(here.tolist())}
    for what, read, known in (("p", c.p_trial, firsts), ("q", c.q, firsts[c.sampled[firsts]])):
        search = _rows(trials, what, read, known, known) if len(known) else None
        if search is None:
            continue
        at = [numbers[str(item.where)] for item in search.items]
        made = [RuleChange(f"the {what} of {relation.name}", ROWS, row=relation) for relation in OTHERS]
        if what == "p":
            powers = ((f"its p to the power {x:g}", knob("temperature", times(1 / x))) for x in POWERS)
            made += [RuleChange(name, "p", colder) for name, colder in powers]
        for change in made:
            values = search.predicted((change,))
            values = np.where(search.greedy, (values > 0).astype(float), values)
            if change.row is not None:
                of = change.row
                there = [search.rows.places.related(of, item.row, item.child) for item in search.items]
                values[np.array(there) < 0] = np.nan
            whole = np.full(len(here), np.nan)
            whole[at] = values
            yield DecisionPart(what, change.name, whole)


def _ways(c: Columns, here: Indices, wrong: Bools, others: Sequence[DecisionPart]) -> Iterator[DecidedBy]:
    """Every part that is not as it should be by itself, and every two of different axes."""
    right = {"p": c.p_trial[here], "q": c.q_trial[here], "coin": c.coin[here]}
    parts = [
        DecisionPart(axis, name, values[here]) for axis, each in _instead(c).items() for name, values in each.items()
    ]
    parts += [*others, *(DecisionPart(ACCEPTANCE, name, right["p"]) for name in TESTS if name != RIGHT)]
    for way in (*((part,) for part in parts), *combinations(parts, 2)):
        if len({part.axis for part in way}) == len(way):
            yield _decided(c.accepted[here], wrong, right, way)


def _decided(accepted: Bools, wrong: Bools, right: dict[str, Doubles], parts: Sequence[DecisionPart]) -> DecidedBy:
    changed = {part.axis: part.name for part in parts}
    p, q, coin = (right | {part.axis: part.values for part in parts if part.axis in right}).values()
    p, q, coin = (
        np.where(np.isnan(given), own, given) for given, own in zip((p, q, coin), right.values(), strict=True)
    )
    known = ~np.isnan(p + q + coin)
    with np.errstate(invalid="ignore"):
        fits = (TESTS[changed.get(ACCEPTANCE, RIGHT)](p, q, coin) == accepted) & known
    return DecidedBy(changed, int((fits & wrong).sum()), int((known & wrong).sum()), int(fits.sum()), int(known.sum()))
