"""How many drafts a step accepts, from nothing but its p, q and coins."""

import numpy as np

from specscope.trace.record.rules import BLOCK, MATCH
from specscope.trace.record.tree import ROOT


def accepted(part):
    verdict, tree = part.verdict, part.tree
    p, q, coin = (values.astype(np.float64) for values in (verdict.p, tree.q, verdict.coin))
    if part.rule == MATCH:
        return _walked(tree, p, coin)
    if part.rule == BLOCK:
        fits = np.flatnonzero(coin < verdict.accept_prob)
        return int(fits[-1]) + 1 if len(fits) else 0
    fits = coin * q < p
    return len(fits) if fits.all() else int(np.argmin(fits))


def _walked(tree, p, coin):
    """Below a parent the coin falls on a child's share of the sum, or beyond all of them."""
    at, depth = ROOT, 0
    while children := tree.children(at):
        sums = np.cumsum(p[children])
        hit = [child for child, total in zip(children, sums, strict=True) if coin[children[0]] < total and p[child] > 0]
        if not hit:
            return depth
        at, depth = hit[0], depth + 1
    return depth
