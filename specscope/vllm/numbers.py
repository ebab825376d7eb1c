"""Numbers: what was read of a request's part in a step, on the host or on a device, and the evidence it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specscope.trace.records import DraftNotes, FinalKind, Outcome, ParentNotes, Verdict
from specscope.trace.tree import Doubles, DraftTree, Drawn, Floats, Ints

NO_INTS, NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True)
class Judged:
    """What becomes of it is a RequestStep."""

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
    forced: Ints = field(default_factory=lambda: NO_INTS)  # nodes whose outcome was forced, and n: the final token

    @property
    def kind(self) -> FinalKind:
        """Where the final token came from."""
        if not len(self.tokens):
            return FinalKind.TARGET
        return FinalKind.BONUS if self.accepted == len(self.tokens) else FinalKind.RECOVERED


def assembled(numbers: Numbers) -> Judged:
    """Tree and verdict."""
    n = len(numbers.tokens)
    p, q = numbers.p, numbers.q
    tried = min(numbers.accepted + 1, n)
    outcome = np.full(n, Outcome.UNTRIED, np.uint8)
    outcome[: numbers.accepted] = Outcome.ACCEPTED
    outcome[numbers.accepted : tried] = Outcome.REJECTED
    accept = numbers.accept
    if accept is None:
        accept = np.minimum(1.0, p.astype(np.float64) / np.where(q > 0, q, 1)) * (q > 0)
    residual = np.zeros(n)
    residual[numbers.accepted : tried] = numbers.mass
    verdict = Verdict(
        outcome=outcome,
        p=p,
        p_trial=np.where(outcome == Outcome.UNTRIED, 0, p).astype(np.float32),
        q_trial=np.where(outcome == Outcome.UNTRIED, 0, q).astype(np.float32),
        accept_prob=np.where(outcome == Outcome.UNTRIED, 0.0, accept),
        coin=numbers.coin,
        residual_mass=residual,
        path=np.arange(numbers.accepted, dtype=np.int32),
        token=numbers.final,
        kind=numbers.kind,
        final_p=numbers.final_p,
        final_coin=0.0,  # drawn with noise over all tokens, and not with one coin
        forced=numbers.forced,
    )
    drawn = Drawn.WITH_REPLACEMENT if numbers.sampled else Drawn.DETERMINISTIC
    chain = np.arange(-1, n - 1, dtype=np.int32)
    tree = DraftTree(numbers.tokens, chain, q, np.full(n, drawn, np.uint8))
    notes = None if numbers.prob is None else _draft_notes(numbers.prob)
    return Judged(tree, verdict, numbers.parents, notes, numbers.invalid, numbers.confidence)


def _draft_notes(prob: Floats) -> DraftNotes:
    """The scores of a chain."""
    score = np.cumsum(np.log(np.maximum(prob, np.finfo(np.float32).tiny))).astype(np.float32)
    return DraftNotes(prob, score, NO_INTS, NO_INTS, NO_FLOATS)
