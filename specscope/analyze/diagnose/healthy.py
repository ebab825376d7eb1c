"""Explanations in which nothing is wrong: a weak drafter, hard text, a tree that is too small."""

from __future__ import annotations

import numpy as np

from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import REMARK, Suspect
from specscope.trace.history.wording import plural

WEAK = 0.5  # of the first drafted tokens accepted
HARD = 1.0  # nats: about as unsure as between three equal tokens
EASY = 0.75  # conditional acceptance at the deepest level: one more level would gain about as much
FEWEST = 20  # drafts, or trials at a depth


def weak_drafter(case: Case) -> Suspect | None:
    """Most first drafts are rejected, and the text is not known to be hard."""
    figures = case.history.acceptance
    if figures.drafts < FEWEST or not figures.conditional or figures.conditional[0] is None:
        return None
    first = figures.conditional[0]
    entropy = _entropy(case)
    if first >= WEAK or (entropy is not None and entropy[0] > HARD):
        return None
    lines = [f"the first drafted level is accepted in {first:.0%} of {figures.drafts:,} drafts"]
    if entropy is not None:
        nats, bound, roots = entropy
        lines.append(
            f"the target itself is sure there: its own entropy is {bound}{nats:.2f} nats (n = {plural(roots, 'root')})"
        )
    return Suspect(Cause.WEAK_DRAFTER, REMARK * (1 - first), tuple(lines))


def hard_text(case: Case) -> Suspect | None:
    """The target's own distribution is wide: no drafter could guess it."""
    entropy = _entropy(case)
    if entropy is None or entropy[0] <= HARD:
        return None
    nats, bound, roots = entropy
    line = f"the entropy of the target's own distribution is {bound}{nats:.2f} nats where drafts are tried "
    line += f"(n = {plural(roots, 'root')})"
    return Suspect(Cause.HARD_TEXT, REMARK * min(nats / 4, 1.0), (line,))


def tree_too_small(case: Case) -> Suspect | None:
    """The deepest level is accepted nearly as often as the first."""
    figures = case.history.acceptance
    reached = len(figures.conditional)
    deep = [
        (depth, rate)
        for depth, rate in enumerate(figures.conditional, 1)
        if rate is not None and figures.tried_at[depth - 1] >= FEWEST
    ]
    if not deep or deep[-1][1] < EASY:
        return None
    depth, rate = deep[-1]
    trials = figures.tried_at[depth - 1]
    last = "the last" if depth == reached else f"the deepest with {FEWEST} trials (trees reach {reached})"
    line = f"depth {depth}, {last}, is accepted in {rate:.0%} of {plural(trials, 'trial')}"
    return Suspect(Cause.TREE_TOO_SMALL, REMARK * rate / 2, (line,))


def _entropy(case: Case) -> tuple[float, str, int] | None:
    """Mean entropy of the target's raw distribution at the roots that were tried, in nats, with "" or "at least ".

    At temperature 1 without other rules it is recorded. Else the likeliest tokens by raw p bound it from below, with
    the mass that they leave counted as one token. None where the capture does not say.
    """
    c = case.evidence
    e = c.parents
    if not len(e):
        return None
    roots = np.flatnonzero((e.row == c.root_row[e.step]) & c.told[e.step])
    if len(roots) < FEWEST:
        return None
    params = [c.params[step] for step in e.step[roots].tolist()]
    plain = np.array(
        [p.temperature == 1 and not p.moved and not p.top_k and p.top_p == 1 and not p.min_p for p in params], np.bool_
    )
    if plain.all():
        return float(e.entropy[roots].mean()), "", len(roots)
    if not e.top_p.shape[1]:
        return None
    top = np.clip(e.top_p[roots], 0, 1)
    rest = np.clip(1 - top.sum(axis=1, keepdims=True), 0, 1)
    shares = np.concatenate([top, rest], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = -np.where(shares > 0, shares * np.log(shares), 0).sum(axis=1)
    return float(np.where(plain, e.entropy[roots], least).mean()), "at least ", len(roots)
