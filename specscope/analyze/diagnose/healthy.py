"""Explanations in which nothing is wrong: a weak drafter, hard text, a high temperature, a tree that is too small."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.locate.located import Proof
from specscope.analyze.verify.trial import Case
from specscope.trace.history.wording import plural

WEAK = 0.5  # of the first drafted tokens accepted
BY_CHANCE = 0.03  # likewise: with so few a drafter does not know this text, its target or its tokens
FEW_TOKENS = 50  # of a vocabulary: chance alone ranks a token high
HARD = 1.0  # nats: about as unsure as between three equal tokens
EASY = 0.75  # conditional acceptance at the deepest level: one more level would gain about as much
WIDEST = 2**18  # tokens: no vocabulary is larger
SHIFTED = 0.5  # of the first drafted tokens are a neighbour of the one that was wanted
FEWEST = 20  # drafts, or trials at a depth


def remarks(case: Case) -> list[Suspect]:
    entropy = Entropy.of(case)
    weak = [*shifted(case)] or [*weak_drafter(case, entropy)]
    return [*weak, *wide(entropy), *tree_too_small(case)]


def shifted(case: Case) -> Iterator[Suspect]:
    """Most first drafts are the output's token after the wanted one, or the one before it. Of any drafter."""
    run, drafts, near = case.history.run, 0, Counter[int]()  # by how far the first draft is from the wanted token
    for request in case.history.requests.values() if run is not None and run.tells_tokens else ():
        output, place = [token for token, _ in request.output()], 0
        for part in request.steps:
            if len(part.tree) and 0 < place < len(output) - 1:
                near.update(by for by in (-1, 0, 1) if output[place + by] == part.tree.token[0])
                drafts += 1
            place += part.emitted
    late, early = ("what the target chose one step later", "late"), ("the last committed token itself", "early")
    for count, (where, begins) in ((near[1], late), (near[-1], early)):
        if drafts >= FEWEST and count > SHIFTED * drafts and near[0] < (1 - SHIFTED) * count:
            line = f"the first drafted token is {where} in {count:,} of {drafts:,} drafts"
            yield Suspect(Cause.DRAFTS_SHIFTED, Proof.SUM, (f"{line}: drafts begin one token too {begins}",))


def weak_drafter(case: Case, entropy: Entropy | None) -> Iterator[Suspect]:
    """Most first drafts are rejected, and neither hard text nor the temperature explains it."""
    figures = case.history.acceptance
    first = figures.conditional[0] if figures.conditional and figures.drafts >= FEWEST else None
    if first is None or first >= WEAK or (entropy is not None and (entropy.is_hard or entropy.is_heated)):
        return
    lines = [f"the first drafted level is accepted in {first:.0%} of {figures.drafts:,} drafts"]
    if entropy is not None and entropy.most <= HARD:
        lines.append(f"the target itself is sure there: its own entropy is {entropy.words}")
    elif entropy is not None:
        lines.append(f"whether the text is hard is unknown: the target's own entropy is {entropy.words}")
    ranks = case.evidence.parents.choice_rank
    ranks = ranks[ranks > 0]
    by_chance = len(ranks) >= FEWEST and ranks.max() > FEW_TOKENS and np.median(ranks) > ranks.max() / 4
    is_weak = first > BY_CHANCE or (len(ranks) > 0 and not by_chance)
    if by_chance and not is_weak:
        line = f"the drafter ranks the token that the target wants {round(np.median(ranks)):,}th at the median, of "
        lines.append(f"{line}{ranks.max():,} or more: as by chance")
    yield Suspect(Cause.WEAK_DRAFTER if is_weak else Cause.DRAFTER_AT_CHANCE, Proof.SUM, tuple(lines))


def wide(entropy: Entropy | None) -> Iterator[Suspect]:
    """The target's own distribution is wide, so that no drafter could guess it; or the temperature makes p wide."""
    if entropy is not None and entropy.is_hard:
        line = f"where drafts are tried, the entropy of the target's own distribution is {entropy.words}"
        yield Suspect(Cause.HARD_TEXT, Proof.SUM, (line,))
    elif entropy is not None and entropy.is_heated:
        line = f"where drafts are tried, p at temperature {entropy.temperature:g} has an entropy of "
        line += f"{entropy.sampled:.2f} nats; the target's own is {entropy.words}"
        yield Suspect(Cause.HIGH_TEMPERATURE, Proof.SUM, (line,))


def tree_too_small(case: Case) -> Iterator[Suspect]:
    """The deepest level is accepted nearly as often as the first."""
    figures = case.history.acceptance
    rates, reached = zip(figures.conditional, figures.tried_at, strict=False), len(figures.conditional)
    deep = [(depth, rate, n) for depth, (rate, n) in enumerate(rates, 1) if rate is not None and n >= FEWEST]
    for depth, rate, trials in deep[-1:]:
        last = "the last" if depth == reached else f"the deepest with {FEWEST} trials (trees reach {reached})"
        line = f"depth {depth}, {last}, is accepted in {rate:.0%} of {plural(trials, 'trial')}"
        yield from [Suspect(Cause.TREE_TOO_SMALL, Proof.SUM, (line,))] if rate >= EASY else []


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
        return self.least > HARD

    @property
    def is_heated(self) -> bool:
        """Whether it may be sure, but p is wide at a temperature above 1."""
        return self.temperature > 1 and self.sampled > HARD

    @property
    def words(self) -> str:
        """Its own, with the roots that it was taken at."""
        bounds = [*dict.fromkeys((f"{self.least:.2f}", f"{self.most:.2f}"))]
        told = f"at least {bounds[0]}" if self.is_hard and len(bounds) > 1 else " and ".join(bounds)
        between = "between " * (len(bounds) > 1 and not self.is_hard)  # `most` is of the widest vocabulary there is
        return f"{between}{told} nats (n = {plural(self.roots, 'root')})"

    @staticmethod
    def of(case: Case) -> Entropy | None:
        """None where the capture does not say. At temperature 1 without other rules the target's own is recorded. Else
        the likeliest tokens by raw p bound it: the mass that they leave is one token, or spread evenly. Heat makes a
        distribution wider: without other rules p has the larger entropy above temperature 1.
        """
        c, e = case.evidence, case.evidence.parents
        roots = np.flatnonzero((e.row == c.root_row[e.step]) & c.told[e.step])
        params = [c.params[step] for step in e.step[roots].tolist()]
        uncut = (c.asked(lambda asked: asked.plain) & c.tells_rules)[e.step[roots]]
        if len(roots) < FEWEST or not (e.top_p.shape[1] or uncut.all()):
            return None
        heat, sampled, top = np.array([p.temperature for p in params]), e.entropy[roots], np.clip(e.top_p[roots], 0, 1)
        rest = np.clip(1 - top.sum(axis=1), 0, 1)  # all, where none is listed
        shares = np.concatenate([top, rest[:, None]], axis=1)
        least = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1)
        most, known = least + rest * math.log(WIDEST), uncut & (heat > 0)
        least = np.where(known & (heat <= 1), np.maximum(least, sampled), least)
        most = np.where(known & (heat >= 1), np.minimum(most, sampled), most)
        own, wide, given = (float(values.mean()) for values in (least, np.maximum(least, most), sampled))
        return Entropy(own, wide, given, float(heat.max()), len(roots))
