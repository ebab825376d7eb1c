"""The verdict located: which p, q, coin or comparison gives the outcomes of drafts that were decided against their own.

Where all follow, figures that are not their formula's are told where something known stands in place of the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rows import Models, around, rows_of
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.locate.decided import ACCEPTANCE
from specscope.analyze.locate.formulas import NEARLY, Best, located_formulas
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
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


@dataclass(frozen=True)
class Trials:
    """Nodes that were tried under the standard rule, in some steps, and the models that may be asked about them."""

    case: Case
    audit: Audit
    models: Models
    nodes: Indices  # over all of the run
    firsts: Indices  # those of them before which no sibling was tried
    steps: dict[int, tuple[str, int]]  # request and number by step

    @property
    def c(self) -> Columns:
        """What is recorded."""
        return self.case.evidence


def located_verdicts(case: Case, audit: Audit, models: Models) -> list[Located]:
    """What the verdict takes in place of its own p, q, coin or comparison. Empty where every outcome follows from them.

    Raises UserError where a model cannot be loaded.
    """
    c = case.evidence
    judged = np.array([not len(verdict.forced) for verdict in c.verdicts], np.bool_) & (c.rule == STANDARD)
    nodes = np.flatnonzero(c.tried & (judged & c.told)[c.step]) if len(c.token) else np.zeros(0, np.int64)
    margin = c.p_trial - c.coin * c.q_trial
    known = (c.coin != 0) | c.greedy[c.step]  # else the engine tells no coin
    against = known & (np.abs(margin) > 1e-6) & ((margin > 0) != c.accepted)  # by more than rounding
    if int(against[nodes].sum()) >= ENOUGH:
        steps = some(list(dict.fromkeys(c.step[nodes[against[nodes]]].tolist())))
        keys = {step: (c.visits[step].request.id, c.visits[step].part.index) for step in steps}
        here = nodes[np.isin(c.step[nodes], steps)]
        firsts = np.sort(here[np.unique(c.row[here], return_index=True)[1]])
        if (found := _outcomes(Trials(case, audit, models, here, firsts, keys), against)) is not None:
            return [found]
    return [item for item in located_formulas(case) if item.looks]


def _outcomes(trials: Trials, against: Bools) -> Located | None:
    """Which p, q, coin or comparison gives the outcomes of drafts that were decided against their own."""
    c, here = trials.c, trials.nodes
    decided = {name: (axis, accepted == c.accepted[here]) for axis, name, accepted in _decisions(trials)}
    likely = {name: fits for name, (_, fits) in decided.items() if fits.sum() > NEARLY * len(here)}
    best = Best.of(likely, against[here])
    if best is None or best.explained < max(ENOUGH, NEARLY * best.wrong):
        return None
    node = int(here[against[here]][0])
    where, outcome = c.at_node(node), Outcome(int(c.outcome[node])).name.lower()
    figures = f"p {c.p_trial[node]:.6g}, q {c.q_trial[node]:.6g}, coin {c.coin[node]:.6g}, {outcome}"
    return Located(
        Operation(Stage.VERDICT, decided[best.name][0], "whether a draft is accepted"),
        f"{best.explained:,} of {plural(best.wrong, 'draft')} decided against their own p follow from {best.name}, as "
        f"do {best.fits:,} of all {len(here):,} that it could decide ({plural(len(decided), 'way')} tried)",
        best.name,
        f"token {c.token[node]} at {where}: {figures}",
        where,
        best.explained,
        best.wrong,
        "draft",
        runner_up=best.next_best,
        spoiled=(len(here) - best.fits) - (best.wrong - best.explained),
        proof=Proof.ROWS,
    )


def _decisions(trials: Trials) -> Iterator[tuple[str, str, Bools]]:
    """What is accepted where one thing is not as it should be: which of p, q, coin and comparison, and its name."""
    c, here = trials.c, trials.nodes
    right = {"p": c.p_trial[here], "q": c.q_trial[here], "coin": c.coin[here]}
    for axis, name, values in (*_of_capture(c, here), *_other_rows(trials)):
        given = right | {axis: np.where(np.isnan(values), right[axis], values)}
        yield axis, name, TESTS[RIGHT](*given.values())
    for name, test in TESTS.items():
        if name != RIGHT:
            yield ACCEPTANCE, name, test(*right.values())


# What may stand in place of a trial's own p, q or coin: which of them, its name, and its value of each node; NaN: none


def _of_capture(c: Columns, here: Indices) -> Iterator[tuple[str, str, Doubles]]:
    """What is recorded of something else."""
    yield "p", "its p before any sibling was rejected", c.p[here]
    yield "q", "a q of 1", np.ones(len(here))
    yield "q", "its q before any sibling was rejected", c.q[here]
    yield "coin", "the coin of the final token", c.final_coin[c.step[here]]


def _other_rows(trials: Trials) -> Iterator[tuple[str, str, Doubles]]:
    """p, and q where it was drawn from, of other rows, and p at other temperatures: of first trials alone."""
    c, here = trials.c, trials.nodes
    for what, read, known in (
        ("p", c.p_trial, trials.firsts),
        ("q", c.q, trials.firsts[c.sampled[trials.firsts]]),
    ):
        every = rows_of(trials.case, trials.models, what, around(trials.case, trials.steps.values()))
        every = [asked for asked in every if asked.logits and not asked.contexts.limits]
        if not every:
            continue
        rows, items, nodes = RuledRows(Places(every), what, None), list[Item](), list[int]()
        by_key = {asked.step.key: asked for asked in every}
        for node in known.tolist():
            number = rows.places.at(by_key.get(trials.steps[int(c.step[node])]), int(c.parent[node]))
            if number >= 0:
                item, token = item_at(rows, number, trials.audit, c.at_node(node)), int(c.token[node])
                recorded, child = float(read[node]), int(c.node[node])
                items.append(replace(item, token=token, recorded=recorded, wrong=True, child=child))
                nodes.append(node)
        if not items:
            continue
        search = Search(rows, items, logits_right=True)
        made = [RuleChange(f"the {what} of {relation.name}", ROWS, row=relation) for relation in OTHERS]
        colder = ((power, changed("temperature", times(1 / power))) for power in POWERS if what == "p")
        made += [RuleChange(f"its p to the power {power:g}", "p", recipe) for power, recipe in colder]
        for change in made:
            values, whole = search.predicted(change), np.full(len(here), np.nan)
            whole[np.searchsorted(here, nodes)] = np.where(search.greedy, values > 0, values)
            yield what, change.name, whole
