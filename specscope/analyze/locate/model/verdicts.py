"""The verdict located: which p, q, coin and comparison explain each outcome, and what each final token was drawn from.

Three questions, each over what the one before found right: whether trials read their own p and q; whether outcomes
follow from them and from the coin; whether the final token follows from what was left. Figures that these leave, and
that are not their formula's, follow where something known stands in place of the right one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rows import Models, around, rows_of
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.locate.decided import ACCEPTANCE
from specscope.analyze.locate.formulas import NEARLY, Best, located_formulas, same
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.locate.model.finals import located_finals
from specscope.analyze.locate.model.other_rows import OTHERS, Places, some
from specscope.analyze.locate.model.sampling import ROWS, RuleChange, RuledRows, changed, times
from specscope.analyze.locate.model.search import Item, Search, item_at
from specscope.analyze.verify.case import Case
from specscope.trace.history.wording import plural
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import Bools, Doubles

ENOUGH = 4  # decisions that an explanation must explain
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
    judged = np.array([not len(verdict.forced) for verdict in c.verdicts], np.bool_) & (c.rule == STANDARD)
    nodes = np.flatnonzero(c.tried & (judged & c.told)[c.step]) if len(c.token) else np.zeros(0, np.int64)
    firsts = nodes[np.unique(c.row[nodes], return_index=True)[1]]
    trials = Trials(case, audit, models, nodes, np.sort(firsts))
    located = [*_reads(trials), *_outcomes(trials)] or located_finals(case, audit, models)
    return located or [item for item in located_formulas(case) if item.looks]


# What may stand in place of a trial's own p, q or coin


def _elsewhere(c: Columns) -> dict[str, Indices]:
    """[N] by what it is to a node: a node of the step before, another request or the same tree; -1 where none."""
    batches = defaultdict[int, list[tuple[int, int]]](list)
    for step, visit in enumerate(c.visits):
        batches[visit.record.step].append((visit.row, step))
    following, preceding = np.full((2, len(c)), -1)
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
        "the same node of the previous step": of_step(c.before),
        "the next request in the batch": of_step(following),
        "the previous request in the batch": of_step(preceding),
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


def _located(
    trials: Trials, operation: str, words: str, sentence: str, best: Best, unit: str, node: int, figures: str
) -> Located:
    where = trials.c.at_node(node)
    smallest, counts = f"token {trials.c.token[node]} at {where}: {figures}", (best.explained, best.wrong, unit)
    at, next_best = Operation(Stage.VERDICT, operation, words), best.next_best
    return Located(at, sentence, best.name, smallest, where, *counts, runner_up=next_best, proof=Proof.ROWS)


# What trials read


def _reads(trials: Trials) -> Iterator[Located]:
    """Whether the p and q of first trials are those of their own node; else whose they are.

    1, a value of elsewhere in the capture, or the token's in another row of the model.
    """
    c, firsts, instead = trials.c, trials.firsts, _instead(trials.c)
    for what, read, own, known in (
        ("p", c.p_trial, c.p, firsts),
        ("q", c.q_trial, c.q, firsts[c.sampled[firsts]]),
    ):
        wrong = known[~same(read[known], own[known])]
        if len(wrong) < ENOUGH:
            continue
        fits = {name: same(values[wrong], read[wrong]) for name, values in instead[what].items()}
        best, node = Best.of(fits, np.ones(len(wrong), np.bool_)), int(wrong[0])
        if best is None or best.explained < NEARLY * len(wrong):
            search, _ = _search(trials, what, read, wrong, known)
            answer = None if search is None else search.answer()
            if answer is None:
                continue
            made = answer.best
            best = Best(made.change.name, made.explained, answer.wrong, made.explained, answer.tried, answer.next_best)
        sentence = (
            f"drafts are judged by a {what} that is not theirs: with {best.name} it is as recorded at "
            f"{best.explained:,} of {plural(best.wrong, 'first trial')} at which it differs "
            f"({plural(best.tried, 'explanation')} tried)"
        )
        words, figures = f"the {what} that a draft is judged by", f"{what} {own[node]:.6g}, judged by {read[node]:.6g}"
        yield _located(trials, what, words, sentence, best, "first trial", node, figures)


def _some_steps(c: Columns, nodes: Indices) -> dict[int, tuple[str, int]]:
    """Some of the steps of nodes, spread over the run: request and number by step."""
    steps = some(list(dict.fromkeys(c.step[nodes].tolist())))
    return {step: (c.visits[step].request.id, c.visits[step].part.index) for step in steps}


def _search(
    trials: Trials, what: str, read: Doubles, wrong: Indices, known: Indices
) -> tuple[Search | None, list[int]]:
    """A search over first trials, what was read of each, by its own row and by others; and the node of each item."""
    c, keys = trials.c, _some_steps(trials.c, wrong)
    every = rows_of(trials.case, trials.models, what, around(trials.case, keys.values()))
    every = [asked for asked in every if asked.logits and not asked.contexts.limits]
    if not every:
        return None, []
    rows, items, nodes = RuledRows(Places(every), what, None), list[Item](), list[int]()
    by_key, bad = {asked.step.key: asked for asked in every}, set(wrong.tolist())
    for node in known.tolist():
        asked = by_key.get(keys.get(int(c.step[node]), ("", -1)))
        number = -1 if asked is None else rows.places.at(asked, int(c.parent[node]))
        if number >= 0:
            item, child = item_at(rows, number, trials.audit, c.at_node(node)), int(c.node[node])
            here = replace(item, token=int(c.token[node]), recorded=float(read[node]), wrong=node in bad, child=child)
            items.append(replace(here, slack=max(item.slack, 4e-5)))
            nodes.append(node)
    return Search(rows, items, logits_right=True) if items else None, nodes


# What the outcomes follow from

RIGHT = "the coin below p / q"
TESTS: dict[str, Callable[[Doubles, Doubles, Doubles], Bools]] = {  # of p, q and the coin
    RIGHT: lambda p, q, coin: coin * q < p,
    "the coin below q / p": lambda p, q, coin: coin * p < q,
    "the coin not below p / q": lambda p, q, coin: coin * q >= p,
    "the coin at most q": lambda p, q, coin: coin <= q,
    "p / q above 1/2, ignoring the coin": lambda p, q, coin: p > 0.5 * q,
    "p above q, ignoring the coin": lambda p, q, coin: p > q,
    "every draft accepted": lambda p, q, coin: np.ones(len(p), np.bool_),
    "every draft rejected": lambda p, q, coin: np.zeros(len(p), np.bool_),
}


def _outcomes(trials: Trials) -> Iterator[Located]:
    """Which p, q, coin or comparison gives the outcomes of drafts that were decided against their own."""
    c, nodes = trials.c, trials.nodes
    margin = c.p_trial - c.coin * c.q_trial
    known = (c.coin != 0) | c.greedy[c.step]  # else the engine tells no coin
    against = known & (np.abs(margin) > 1e-6) & ((margin > 0) != c.accepted)  # by more than rounding
    if int(against[nodes].sum()) < ENOUGH:
        return
    here = nodes[np.isin(c.step[nodes], list(_some_steps(c, nodes[against[nodes]])))]
    decided = {name: (axis, accepted == c.accepted[here]) for axis, name, accepted in _decisions(trials, here)}
    likely = {name: fits for name, (_, fits) in decided.items() if fits.sum() > NEARLY * len(here)}
    best = Best.of(likely, against[here])
    if best is None or best.explained < max(ENOUGH, NEARLY * best.wrong):
        return
    sentence = (
        f"{best.explained:,} of {plural(best.wrong, 'draft')} decided against their own p follow from {best.name}, as "
        f"do {best.fits:,} of all {len(here):,} that it could decide "
        f"({plural(len(decided), 'way')} tried)"
    )
    node = int(here[against[here]][0])
    figures = f"p {c.p_trial[node]:.6g}, q {c.q_trial[node]:.6g}, coin {c.coin[node]:.6g}"
    figures, axis = f"{figures}, {Outcome(int(c.outcome[node])).name.lower()}", decided[best.name][0]
    found = _located(trials, axis, "whether a draft is accepted", sentence, best, "draft", node, figures)
    yield replace(found, spoiled=(len(here) - best.fits) - (best.wrong - best.explained))


def _decisions(trials: Trials, here: Indices) -> Iterator[tuple[str, str, Bools]]:
    """What is accepted where one thing is not as it should be: which of p, q, coin and comparison, and its name."""
    c = trials.c
    right = {"p": c.p_trial[here], "q": c.q_trial[here], "coin": c.coin[here]}
    of_capture = ((axis, name, values[here]) for axis, each in _instead(c).items() for name, values in each.items())
    for axis, name, values in (*of_capture, *_other_rows(trials, here)):
        given = right | {axis: np.where(np.isnan(values), right[axis], values)}
        yield axis, name, TESTS[RIGHT](*given.values())
    for name, test in TESTS.items():
        if name != RIGHT:
            yield ACCEPTANCE, name, test(*right.values())


def _other_rows(trials: Trials, here: Indices) -> Iterator[tuple[str, str, Doubles]]:
    """p, and q where it was drawn from, of other rows, and p at other temperatures: of first trials alone."""
    c, firsts = trials.c, here[np.isin(here, trials.firsts)]
    for what, read, known in (("p", c.p_trial, firsts), ("q", c.q, firsts[c.sampled[firsts]])):
        search, nodes = _search(trials, what, read, known, known)
        if search is None:
            continue
        made = [RuleChange(f"the {what} of {relation.name}", ROWS, row=relation) for relation in OTHERS]
        if what == "p":
            powers = ((f"its p to the power {power:g}", changed("temperature", times(1 / power))) for power in POWERS)
            made += [RuleChange(name, "p", colder) for name, colder in powers]
        for change in made:
            values, whole = search.predicted(change), np.full(len(here), np.nan)
            whole[np.searchsorted(here, nodes)] = np.where(search.greedy, values > 0, values)
            yield what, change.name, whole
