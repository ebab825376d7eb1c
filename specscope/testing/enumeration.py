"""Is a rule of verification lossless? By enumeration, over every draw of the drafts and every outcome of the coins.

The verdicts are those of the engine's own code. p and q are random conditional distributions over a small vocabulary;
what a step does not emit is continued by the target, up to one token more than the tree is deep.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.errors import UserError, short
from specscope.kernels.tree_batch import FlatTrees
from specscope.speculate.sampling import TargetRows
from specscope.speculate.verify import host
from specscope.speculate.verify.batch import VerifyBatch, judged_tree
from specscope.trace.record.own_rule import NodeTrial, OwnRule
from specscope.trace.record.tree import ROOT, Doubles, DraftTree, Drawn
from specscope.tree_shape import TreeShape, parse_tree

Prefix = tuple[int, ...]
Conditional = Callable[[Prefix], Doubles]
Rows = Mapping[int, Tensor]
Outcome = tuple[float, Any, Doubles]  # its probability, the accepted path, [V] what the last token is drawn from
Outcomes = Callable[[DraftTree, Sequence[Tensor], Rows], Iterator[Outcome]]  # of a tree, p at each row, q by parent
ACCEPT, REJECT = 1e-300, 1 - 2.0**-53  # coins
COINS: list[float] = [1e-12, *((np.arange(64) + 0.5) / 64).tolist(), 1 - 1e-12]  # at which a rule is looked at


def conditional(vocabulary: int, seed: int) -> Conditional:
    """float64 [V] behind each prefix of tokens, at random."""
    generator = np.random.default_rng(seed)
    return cache(lambda prefix: generator.dirichlet(np.full(vocabulary, 0.5)))


@dataclass(frozen=True)
class Losslessness:
    rule: str
    largest: float  # total variation of what is emitted from what the target emits: 0 to 1
    where: str  # of which p and q
    cases: int  # pairs of p and q

    @property
    def is_lossless(self) -> bool:
        """Whether nothing but rounding differs."""
        return self.largest < 1e-9

    def __str__(self) -> str:
        off = f"the output differs from the target's by {self.largest:.2g} (total variation) at most: {self.where}"
        return f"{self.rule} is {'' if self.is_lossless else 'not '}lossless over {self.cases:,} p and q; {off}"


def lossless(
    rule: Callable[[NodeTrial], Any],
    tree: str = "2x1",
    *,
    vocabulary: int = 4,
    seeds: int = 5,
    drawn: Drawn | None = None,
) -> Losslessness:
    """Enumerate a rule of your own over `seeds` random p and q.

    `tree`: a shape, as --tree has it; `drawn`: how drafts are drawn, None for every way. Raises UserError for a rule
    that cannot be enumerated.
    """
    if not callable(rule):
        raise UserError(f"the rule is {short(rule)}: give a function of a trial")
    if ":" in tree:  # of how drafts are drawn, or of a tree that follows them
        raise UserError(f"the tree is {short(tree)}: give a shape alone, as 2x1; `drawn` says how drafts are drawn")
    if vocabulary < 2 or seeds < 1:
        raise UserError(f"vocabulary must be at least 2 and seeds at least 1, not {vocabulary} and {seeds}")
    own = OwnRule(getattr(rule, "__qualname__", type(rule).__name__), rule)
    outcomes, shape = by_coins(partial(host.verify, own=averaged(own))), parse_tree(tree)
    found: dict[str, float] = {}
    for way, seed in itertools.product(Drawn if drawn is None else [drawn], range(seeds)):
        models = conditional(vocabulary, seed), conditional(vocabulary, seed + 1000)
        where = f"{tree}, {Drawn(way).name.lower().replace('_', ' ')}, seed {seed}"
        found[where] = total_variation(shape, *models, way, outcomes)
    worst = max(found, key=found.__getitem__)
    return Losslessness(own.name, found[worst], worst, len(found))


def averaged(rule: OwnRule) -> OwnRule:
    """The rule with the chance that it accepts, over the coin: exact where it does not look at it, else by bisection.

    Raises UserError where the coins that it accepts are no interval from 0.
    """

    def chance(trial: NodeTrial) -> float:
        def given(coin: float) -> float:
            return rule(replace(trial, coin=coin))

        answers, low, high = [*map(given, COINS)], 0.0, 1.0
        if len(set(answers)) == 1:
            return answers[0]
        accepted = [coin < answer for coin, answer in zip(COINS, answers, strict=True)]
        if accepted != sorted(accepted, reverse=True):
            raise UserError(f"{rule.name} accepts coins that are no interval from 0: it cannot be enumerated")
        while high - low > 2.0**-50:
            middle = (low + high) / 2
            low, high = (middle, high) if middle < given(middle) else (low, middle)
        return high

    return OwnRule(rule.name, chance)


def by_coins(
    verify: Callable[[VerifyBatch], Any], order: Callable[[DraftTree], Iterable[int]] = lambda tree: range(len(tree))
) -> Outcomes:
    """Every outcome of the nodes' coins, tossed in this order."""

    def outcomes(tree: DraftTree, p: Sequence[Tensor], q: Rows) -> Iterator[Outcome]:
        nodes = list(order(tree))

        def explore(given: dict[int, bool], weight: float) -> Iterator[Outcome]:
            coin, rows = [0.5, *(ACCEPT if given.get(node) else REJECT for node in range(len(tree)))], list[Tensor]()
            trees = FlatTrees.build([judged_tree(tree, q, np.array(coin), rows)])
            target = TargetRows(torch.zeros(0, dtype=torch.int64), torch.stack([*p]))
            (verdict,), (left,) = verify(VerifyBatch(trees, target, rows))
            open_ones = [node for node in nodes if verdict.judged[node] and node not in given]
            fresh = next((node for node in open_ones if verdict.accept_prob[node] > 0), None)
            if fresh is None:
                yield weight, verdict.path, left.row.numpy()
                return
            accept = min(float(verdict.accept_prob[fresh]), 1.0)
            yield from explore(given | {fresh: True}, weight * accept)
            if accept < 1:
                yield from explore(given | {fresh: False}, weight * (1 - accept))

        yield from explore({}, 1.0)

    return outcomes


def chance_drawn(q: Doubles, tokens: Sequence[int], drawn: Drawn) -> float:
    """How likely these are the siblings that are drawn from q, in order."""
    if drawn == Drawn.DETERMINISTIC:
        return float(np.array_equal(np.argsort(-q, kind="stable")[: len(tokens)], tokens))
    left, weight = q.copy(), 1.0
    for token in tokens:
        weight *= left[token]
        if drawn == Drawn.WITHOUT_REPLACEMENT and weight:
            left[token] = 0
            left = left / left.sum() if left.sum() else left
    return weight


def trees(shape: TreeShape, q: Conditional, drawn: Drawn) -> Iterator[tuple[DraftTree, Rows, float]]:
    """Every tree of a shape with its q by parent and its probability."""
    inner = {node: shape.children(node) for node in (ROOT, *range(len(shape))) if shape.children(node)}
    for token in itertools.product(range(len(q(()))), repeat=len(shape)):
        tree = DraftTree.build(token, shape.parent, drawn=drawn)
        rows = {node: q(text_to(tree, node)) for node in inner}
        weight = math.prod(chance_drawn(rows[node], [token[child] for child in inner[node]], drawn) for node in inner)
        if weight:
            yield tree, {node: torch.from_numpy(row) for node, row in rows.items()}, weight


def text_to(tree: DraftTree, node: int) -> Prefix:
    return () if node == ROOT else tuple(tree.token[tree.path_to(node)].tolist())


def likely(p: Conditional, prefix: Prefix, rest: Prefix) -> float:
    """How likely the target continues a prefix so."""
    return float(np.prod([p((*prefix, *rest[:place]))[token] for place, token in enumerate(rest)]))


def total_variation(
    shape: TreeShape,
    p: Conditional,
    q: Conditional,
    drawn: Drawn,
    outcomes: Outcomes,
    rearrange: Callable[[DraftTree, Rows], DraftTree] = lambda tree, q: tree,
) -> float:
    """How far what is emitted is from what the target emits. `rearrange`: what is done to a tree after it was drawn."""
    length, vocabulary, joint = shape.max_depth + 1, range(len(p(()))), defaultdict[Prefix, float](float)
    for drafted, rows, weight in trees(shape, q, drawn):
        tree = rearrange(drafted, rows)
        paths = [text_to(tree, node) for node in (ROOT, *range(len(tree)))]
        sampled = {} if (tree.drawn == Drawn.DETERMINISTIC).all() else rows
        for share, path, last in outcomes(tree, [torch.from_numpy(p(path)) for path in paths], sampled):
            begun = tuple(tree.token[path].tolist())
            for token, final in enumerate((last / last.sum()).tolist()):
                for rest in itertools.product(vocabulary, repeat=length - len(begun) - 1):
                    joint[(*begun, token, *rest)] += weight * share * final * likely(p, (*begun, token), rest)
    assert abs(sum(joint.values()) - 1) < 1e-9
    return sum(abs(joint[each] - likely(p, (), each)) for each in itertools.product(vocabulary, repeat=length)) / 2
