"""A chain that another engine drafted and judged: the numbers that were read of it, and the evidence they become.

Where coins follow from seeds, they are Triton's `tl.rand(seed, position)`: Philox 4x32 with ten rounds, here in numpy.

Block verification (Sun et al., 2024): the ratio of a prefix is the product of p / q of its drafts, never above 1 on
the way. A prefix is accepted with h = mass / (mass + 1 - ratio), where the mass is what p has beyond q, with p scaled
by the ratio, one position on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.records import DraftNotes, FinalKind, Outcome, ParentNotes, Verdict
from specscope.trace.record.tree import Doubles, DraftTree, Drawn, Floats, Ints

LEAST = np.float32(4.6566127342e-10)  # 2^-31: one step of the coin, and vLLM's least coin
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
NO_INTS, NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)
LONGEST = 1024  # drafts of a chain; vLLM allows 128
_CHAIN = np.arange(-1, LONGEST, dtype=np.int32)  # each node's parent; from the second on, the nodes themselves
_UNTRIED = np.full(LONGEST, Outcome.UNTRIED, np.uint8)
_SAMPLED = np.full(LONGEST, Drawn.WITH_REPLACEMENT, np.uint8)
_DETERMINISTIC = np.full(LONGEST, Drawn.DETERMINISTIC, np.uint8)
for _shared in (_CHAIN, _SAMPLED, _DETERMINISTIC):
    _shared.setflags(write=False)


@dataclass(frozen=True)
class Judged:
    """One request's judgement, of which a RequestStep is made."""

    tree: DraftTree
    verdict: Verdict
    parents: ParentNotes | None  # None with lean evidence
    notes: DraftNotes | None  # None where the drafter's scores are not known
    invalid: int  # drafts that vLLM had marked as invalid; they are not in the tree
    confidence: Floats | None = None  # [n] what the drafter thinks of its drafts


@dataclass
class Numbers:
    """A chain of n valid drafts, of which `accepted` were accepted."""

    tokens: Ints  # [n]
    accepted: int
    final: int  # the token behind them
    p: Floats  # [n] the target's probability of each draft, after every rule
    q: Floats  # [n] the drafter's; 1 where it is deterministic
    sampled: bool  # whether the drafts were sampled
    coin: Doubles  # [n]; 0 where none was tossed
    mass: float  # of the residual, where a draft was rejected
    final_p: float  # probability of the final token in what it was drawn from
    parents: ParentNotes | None
    prob: Floats | None  # [n] the drafter's own probability of its drafts; None where it is not known
    invalid: int  # further drafts that could not be judged
    accept: Doubles | None = None  # [n] what each draft is accepted by, where that is not p / q
    confidence: Floats | None = None  # [n] what the drafter thinks of its drafts

    @property
    def kind(self) -> FinalKind:
        """Where the final token came from."""
        if not len(self.tokens):
            return FinalKind.TARGET
        return FinalKind.BONUS if self.accepted == len(self.tokens) else FinalKind.RECOVERED


def assembled(numbers: Numbers) -> Judged:
    """Tree and verdict. A chain is short: numpy's ways of working on whole arrays cost more here than they save."""
    n = len(numbers.tokens)
    tried = min(numbers.accepted + 1, n)
    outcome, accept, residual = _UNTRIED[:n].copy(), np.zeros(n), np.zeros(n)
    outcome[: numbers.accepted] = Outcome.ACCEPTED
    outcome[numbers.accepted : tried] = Outcome.REJECTED
    residual[numbers.accepted : tried] = numbers.mass
    accept[:tried] = _ratios(numbers, tried) if numbers.accept is None else numbers.accept[:tried]
    p_trial, q_trial = numbers.p.copy(), numbers.q.copy()
    p_trial[tried:] = q_trial[tried:] = 0
    verdict = Verdict(
        outcome=outcome,
        p=numbers.p,
        p_trial=p_trial,
        q_trial=q_trial,
        accept_prob=accept,
        coin=numbers.coin,
        residual_mass=residual,
        path=_CHAIN[1 : numbers.accepted + 1],
        token=numbers.final,
        kind=numbers.kind,
        final_p=numbers.final_p,
        final_coin=0.0,  # drawn with noise over all tokens, and not with one coin
    )
    drawn = _SAMPLED[:n] if numbers.sampled else _DETERMINISTIC[:n]
    tree = DraftTree(numbers.tokens, _CHAIN[:n], numbers.q, drawn)
    notes = None if numbers.prob is None else _draft_notes(numbers.prob)
    return Judged(tree, verdict, numbers.parents, notes, numbers.invalid, numbers.confidence)


def _ratios(numbers: Numbers, tried: int) -> list[float]:
    """min(1, p / q); 0 where q is, and NaN where one of them is: min and max give their first where neither is more."""
    pairs = zip(numbers.p[:tried].tolist(), numbers.q[:tried].tolist(), strict=True)
    return [0.0 if q == 0 else min(p / q, 1.0) for p, q in pairs]


def _draft_notes(prob: Floats) -> DraftNotes:
    """The drafter's scores of a chain, as DraftNotes."""
    score = np.cumsum(np.log(np.maximum(prob, np.finfo(np.float32).tiny))).astype(np.float32)
    return DraftNotes(prob, score, NO_INTS, NO_INTS, NO_FLOATS)


def thresholds(ratio: Doubles, mass: Doubles) -> Doubles:
    """[n] what each draft of a chain is accepted by: h, and the ratio itself where nothing follows."""
    h = ratio.copy()
    below = mass[1:] + 1 - ratio[:-1]
    h[:-1] = np.where(below <= 0, 1, mass[1:] / np.where(below > 0, below, 1))
    h[:-1][np.isnan(below)] = np.nan
    return h


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> Floats:
    """[n] a coin in (0, 1] for each seed and position."""
    key, counter = seeds.astype(np.uint64), positions.astype(np.uint64)
    k0, k1 = key & LOW, key >> HALF
    c0, c1 = counter & LOW, counter >> HALF
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(10):
        a, b = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & LOW, (a >> HALF) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    signed = c0.astype(np.uint32).view(np.int32)
    folded = np.where(signed < 0, -(signed + 1), signed).astype(np.float32)
    coins: Floats = np.maximum(folded * LEAST, LEAST)
    return coins


def of_step(seeds: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.int64]:
    """Since 0.33 block verification tosses each draft's coin with a seed of its own: vLLM's `spec_step_seed`."""
    return seeds ^ (step << 32)
