"""At which temperature a recorded q was made, and whether the drafts were drawn from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.rates import Sum
from specscope.analyze.findings import Reference
from specscope.trace.tree import Doubles

GRID = np.exp(np.linspace(math.log(0.2), math.log(5.0), 322))  # temperatures, 1 % apart
WHOLE = 0.995  # of the drafter's mass: then its first few tokens are all that count
MOST = 2000  # parents


@dataclass(frozen=True)
class Fit:
    """A temperature that explains the recorded q."""

    found: float
    wanted: float
    count: int
    example: Reference | None


def fitted_temperature(case: Case) -> Fit | None:
    """The temperature of q: the median over parents where the drafter's likeliest tokens hold all of its mass."""
    found, wanted, example = [], [], None
    for step, token, q, top, raw in _parents(case):
        assert step.params is not None
        at = np.flatnonzero(top == token)
        if not len(at) or raw.sum() < WHOLE or not 0.02 < q < 0.98:
            continue
        powers = raw[:, None] ** (1 / GRID)
        at_each = powers[at[0]] / powers.sum(0)
        found.append(float(GRID[int(np.abs(at_each - q).argmin())]))
        wanted.append(step.params.temperature)
        if abs(math.log(found[-1] / wanted[-1])) > 0.1:
            example = example or step.reference()
        if len(found) >= MOST:
            break
    if len(found) < 12 or len(set(wanted)) > 1:
        return None
    return Fit(float(np.median(found)), wanted[0], len(found), example)


def _parents(case: Case) -> Iterator[tuple[Step, int, float, Doubles, Doubles]]:
    """(step, first child's token, its q, the drafter's likeliest tokens, their raw probabilities), rules left out."""
    for step in case.drafting:
        notes, params = step.part.parents, step.params
        if notes is None or params is None or params.greedy or not step.is_sampled or not notes.draft_top.shape[1]:
            continue
        if params.moved or params.top_k or params.top_p < 1 or params.min_p:
            continue
        for place, parent in enumerate(notes.node.tolist()):
            children = step.tree.children(parent)
            if children:
                token, q = int(step.tree.token[children[0]]), float(step.tree.q[children[0]])
                yield step, token, q, notes.draft_top[place], notes.draft_top_p[place].astype(np.float64)


def draws_against_q(case: Case) -> Sum:
    """Surprisal of each parent's first draw less q's entropy: mean 0 where the drafts are drawn from q."""
    total = Sum()
    for step in case.drafting:
        notes = step.part.parents
        if notes is None or not step.is_sampled:
            continue
        for place, parent in enumerate(notes.node.tolist()):
            children = step.tree.children(parent)
            if children and step.tree.q[children[0]] > 0:
                surprisal = -math.log(float(step.tree.q[children[0]]))
                total.add(surprisal - float(notes.q_entropy[place]), float(notes.q_varentropy[place]))
    return total
