"""Explanations in which nothing is wrong: a weak drafter, hard text, a high temperature, a tree that is too small."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Proof, Suspect
from specscope.analyze.verify.case import Case
from specscope.trace.history.wording import plural

WEAK = 0.5  # of the first drafted tokens accepted
BY_CHANCE = 0.03  # likewise: with so few a drafter does not know this text, its target or its tokens
FEW_TOKENS = 50  # of a vocabulary: chance alone ranks a token high
HARD = 1.0  # nats: about as unsure as between three equal tokens
EASY = 0.75  # conditional acceptance at the deepest level: one more level would gain about as much
WIDEST = 2**18  # tokens: no vocabulary is larger
FEWEST = 20  # drafts, or trials at a depth


def remarks(case: Case) -> list[Suspect]:
    """All that apply."""
    entropy = Entropy.of(case)
    found = [weak_drafter(case, entropy), hard_text(entropy), high_temperature(entropy), tree_too_small(case)]
    return [remark for remark in found if remark is not None]


def weak_drafter(case: Case, entropy: Entropy | None) -> Suspect | None:
    """Most first drafts are rejected, and neither hard text nor the temperature explains it."""
    figures = case.history.acceptance
    if figures.drafts < FEWEST or not figures.conditional or figures.conditional[0] is None:
        return None
    first = figures.conditional[0]
    if first >= WEAK or (entropy is not None and (entropy.is_hard or entropy.is_heated)):
        return None
    lines = [f"the first drafted level is accepted in {first:.0%} of {figures.drafts:,} drafts"]
    if entropy is not None and entropy.most <= HARD:
        lines.append(f"the target itself is sure there: its own entropy is {entropy.words}")
    elif entropy is not None:
        lines.append(f"whether the text is hard is not known: the target's own entropy is {entropy.words}")
    ranks = case.evidence.parents.choice_rank
    ranks = ranks[ranks > 0]
    by_chance = len(ranks) >= FEWEST and ranks.max() > FEW_TOKENS and np.median(ranks) > ranks.max() / 4
    if first > BY_CHANCE or (len(ranks) and not by_chance):
        return Suspect(Cause.WEAK_DRAFTER, Proof.SUM, tuple(lines))
    if by_chance:
        lines.append(
            f"to the drafter the token that the target wants is the {round(np.median(ranks)):,}th likeliest at the "
            f"median, of {ranks.max():,} or more: as by chance"
        )
    return Suspect(Cause.DRAFTER_AT_CHANCE, Proof.SUM, tuple(lines))


def hard_text(entropy: Entropy | None) -> Suspect | None:
    """The target's own distribution is wide: no drafter could guess it."""
    if entropy is None or not entropy.is_hard:
        return None
    line = f"where drafts are tried, the entropy of the target's own distribution is {entropy.words}"
    return Suspect(Cause.HARD_TEXT, Proof.SUM, (line,))


def high_temperature(entropy: Entropy | None) -> Suspect | None:
    """The temperature makes the distribution wide that drafts are judged by."""
    if entropy is None or entropy.is_hard or not entropy.is_heated:
        return None
    of_p = f"p at temperature {entropy.temperature:g} has an entropy of {entropy.sampled:.2f} nats"
    line = f"where drafts are tried, {of_p}; the target's own is {entropy.words}"
    return Suspect(Cause.HIGH_TEMPERATURE, Proof.SUM, (line,))


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
    return Suspect(Cause.TREE_TOO_SMALL, Proof.SUM, (line,))


@dataclass(frozen=True)
class Entropy:
    """Of the target at the roots that were tried, in nats, as means."""

    least: float  # of its own distribution, before temperature and rules: at least this,
    most: float  # and at most this
    sampled: float  # of p, as drafts are judged by it
    temperature: float  # the highest
    roots: int

    @property
    def is_hard(self) -> bool:
        """Whether the target itself is unsure."""
        return self.least > HARD

    @property
    def is_heated(self) -> bool:
        """Whether it may be sure, but p is wide at a temperature above 1."""
        return self.temperature > 1 and self.sampled > HARD

    @property
    def words(self) -> str:
        """Its own, with the roots that it was taken at."""
        least, most = f"{self.least:.2f}", f"{self.most:.2f}"
        value = least if least == most else f"between {least} and {most}"
        return f"{value} nats (n = {plural(self.roots, 'root')})"

    @staticmethod
    def of(case: Case) -> Entropy | None:
        """None where the capture does not say.

        At temperature 1 without other rules the target's own is recorded. Else the likeliest tokens by raw p bound it:
        the mass that they leave is one token at the least, and spread evenly at the most. Heat makes a distribution
        wider: without other rules p has the larger entropy above temperature 1, the smaller below it.
        """
        c = case.evidence
        e = c.parents
        roots = np.flatnonzero((e.row == c.root_row[e.step]) & c.told[e.step])
        if len(roots) < FEWEST:
            return None
        params = [c.params[step] for step in e.step[roots].tolist()]
        uncut = np.array([not p.moved and not p.top_k and p.top_p == 1 and not p.min_p for p in params], np.bool_)
        heat, sampled = np.array([p.temperature for p in params]), e.entropy[roots]
        least, most = np.zeros(len(roots)), np.full(len(roots), math.log(WIDEST))
        if e.top_p.shape[1]:
            top = np.clip(e.top_p[roots], 0, 1)
            rest = np.clip(1 - top.sum(axis=1), 0, 1)
            shares = np.concatenate([top, rest[:, None]], axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                least = -np.where(shares > 0, shares * np.log(shares), 0).sum(axis=1)
            most = least + rest * math.log(WIDEST)
        elif not uncut.all():
            return None
        known = uncut & (heat > 0)
        least = np.where(known & (heat <= 1), np.maximum(least, sampled), least)
        most = np.where(known & (heat >= 1), np.minimum(most, sampled), most)
        own, wide, given = (float(values.mean()) for values in (least, np.maximum(least, most), sampled))
        return Entropy(own, wide, given, float(heat.max()), len(roots))
