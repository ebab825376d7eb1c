"""A request's part in a step: its chain, the verdict and what it follows from, read from the sampler's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specscope.trace.parents import ParentsBuilder, RawRow
from specscope.trace.records import DraftNotes, FinalKind, Outcome, ParentNotes, Verdict
from specscope.trace.tree import DraftTree, Drawn, Floats
from specscope.vllm.call import Call, raw_row

NO_INTS, NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True)
class Judged:
    """What becomes of it is a RequestStep."""

    tree: DraftTree
    verdict: Verdict
    parents: ParentNotes | None  # None with lean evidence
    notes: DraftNotes | None  # None where the drafter's scores are not known
    invalid: int  # drafts that vLLM had marked as invalid; they are not in the tree


def judge(call: Call, request: int, drafter: Sequence[Tensor], *, full: bool) -> Judged:
    """Of a request's place in the batch. `drafter`: its logits [V] for each draft, or none."""
    first = sum(call.drafted[:request])
    told = call.draft_tokens[first : first + call.drafted[request]].tolist()
    tokens = np.array(told[: next((at for at, token in enumerate(told) if token < 0), len(told))], np.int32)
    return _One(call, request, first, tokens, drafter[: len(tokens)], full).judged(len(told))


class _One:
    """One request while its numbers are read off."""

    def __init__(
        self, call: Call, request: int, first: int, tokens: np.ndarray, drafter: Sequence[Tensor], full: bool
    ) -> None:
        assert call.output is not None
        row = call.output[request]
        self.call, self.request, self.first = call, request, first
        self.tokens, self.drafter, self.full = tokens, drafter, full
        self.accepted = min(int((row >= 0).sum()) - 1, len(tokens))
        self.final = int(row[self.accepted])
        self.tried = min(self.accepted + 1, len(tokens))
        self.greedy = call.greedy(request)
        self.q = None if self.greedy or call.draft_probs is None else call.draft_probs[first : first + len(tokens)]

    def judged(self, told: int) -> Judged:
        n = len(self.tokens)
        kind = FinalKind.TARGET if not n else FinalKind.BONUS if self.accepted == n else FinalKind.RECOVERED
        p, q, mass, drawn_from, whole = self._distributions(kind)
        outcome = np.full(n, Outcome.UNTRIED, np.uint8)
        outcome[: self.accepted] = Outcome.ACCEPTED
        outcome[self.accepted : self.tried] = Outcome.REJECTED
        accept = np.minimum(1.0, p.astype(np.float64) / np.where(q > 0, q, 1)) * (q > 0)
        residual = np.zeros(n)
        residual[self.accepted : self.tried] = mass
        forced = self.call.forced.get(self.request)
        verdict = Verdict(
            outcome=outcome,
            p=p,
            p_trial=np.where(outcome == Outcome.UNTRIED, 0, p).astype(np.float32),
            q_trial=np.where(outcome == Outcome.UNTRIED, 0, q).astype(np.float32),
            accept_prob=np.where(outcome == Outcome.UNTRIED, 0.0, accept),
            coin=self._coins(),
            residual_mass=residual,
            path=np.arange(self.accepted, dtype=np.int32),
            token=self.final,
            kind=kind,
            final_p=self._final_p(drawn_from),
            final_coin=0.0,  # drawn with noise over all tokens, and not with one coin
            forced=NO_INTS if forced is None else forced.marks(self.tried, n),
        )
        drawn = Drawn.DETERMINISTIC if self.q is None else Drawn.WITH_REPLACEMENT
        chain = np.arange(-1, n - 1, dtype=np.int32)
        tree = DraftTree(self.tokens, chain, q, np.full(n, drawn, np.uint8))
        parents, notes = self._noted(drawn_from, whole)
        return Judged(tree, verdict, parents, notes, told - n)

    def _distributions(self, kind: FinalKind) -> tuple[Floats, Floats, float, Floats | None, Floats | None]:
        """(p and q of the drafts, mass of the residual, what the final token was drawn from, p in full behind it)."""
        n, call = len(self.tokens), self.call
        q = np.ones(n, np.float32)
        if self.greedy and not n:
            return q, q, 0.0, None, None
        if self.q is not None:
            q = self.q.numpy()[np.arange(n), self.tokens]
        if self.greedy:
            p = (self._choices() == self.tokens).astype(np.float32)
            return p, q, 0.0 if kind is not FinalKind.RECOVERED else float(1 - p[self.accepted]), None, None
        rows = range(self.first, self.first + n)
        if call.target_probs is not None:
            p = call.target_probs.numpy()[np.array(rows, np.int64), self.tokens]
        else:
            p = np.array([call.target(row)[token] for row, token in zip(rows, self.tokens, strict=True)], np.float32)
        if kind is not FinalKind.RECOVERED:
            # Behind drafts that are left out, the final token is drawn where the first of these was rejected
            whole = call.target(self.first + n) if n < call.drafted[self.request] else call.bonus(self.request)
            return p, q, 0.0, whole, whole
        whole = call.target(self.first + self.accepted)
        left = whole.copy()
        if self.q is None:
            left[self.tokens[self.accepted]] = 0
        else:
            np.maximum(left - self.q[self.accepted].numpy(), 0, out=left)
        mass = float(left.sum())
        return p, q, mass, left / mass if mass > 0 else whole, whole

    def _final_p(self, drawn_from: Floats | None) -> float:
        """Of the final token in what it was drawn from; a greedy target has all of it at one token."""
        if drawn_from is not None:
            return float(drawn_from[self.final])
        forced = self.call.forced.get(self.request)
        return 1.0 if forced is None else float(self.final == forced.own)

    def _choices(self) -> np.ndarray:
        """The target's likeliest token at each of a greedy request's rows, untried ones too."""
        assert self.call.target_logits is not None
        rows = self.call.target_logits[self.first : self.first + len(self.tokens)]
        best: np.ndarray = np.argmax(rows.numpy(), axis=-1)
        return best

    def _choice(self, at: int) -> int:
        """The likeliest at a tried row: what vLLM went by, unless it was forced."""
        forced = self.call.forced.get(self.request)
        if forced is not None and at in forced.nodes:
            return int(self._choices()[at])
        if at < self.accepted:
            return int(self.tokens[at])
        return self.final if forced is None else forced.own

    def _coins(self) -> np.ndarray:
        """0 where none was tossed: greedy requests have none."""
        if self.greedy or self.call.coins is None:
            return np.zeros(len(self.tokens))
        coins = self.call.coins[self.first : self.first + len(self.tokens)]
        return coins.numpy().astype(np.float64)

    def _noted(self, drawn_from: Floats | None, whole: Floats | None) -> tuple[ParentNotes | None, DraftNotes | None]:
        """What target and drafter gave at the tried parents, and the drafter's scores of its tokens."""
        if not self.full:
            return None, None
        found, prob = ParentsBuilder(len(self.tokens), self.tried), np.zeros(len(self.tokens), np.float32)
        for at in range(self.tried):
            child, token = np.array([at]), self.tokens[at : at + 1]
            raw = self.call.raw(int(self.call.target_rows[self.first + at]))
            found.raw(at, raw, child, token)
            if self.greedy:
                found.chosen(at, self._choice(at), child, token)
            else:
                found.target(at, self.call.target(self.first + at), child, token)
            if self.q is not None:
                found.drawn(at, self.q[at].numpy(), child, token)
            if at < len(self.drafter):
                prob[at] = self._drafter(found, at, raw)
        for at in range(self.tried, len(self.drafter)):
            prob[at] = raw_row(self.drafter[at]).p(self.tokens[at : at + 1])[0]
        final_p = self._final_p(None) if whole is None else float(whole[self.final])
        parents = found.done(np.arange(-1, self.tried - 1, dtype=np.int32), drawn_from, final_p)
        return parents, _draft_notes(prob) if len(self.drafter) else None

    def _drafter(self, found: ParentsBuilder, at: int, raw: RawRow) -> float:
        """What the drafter itself gave at a parent: its probability of the draft. Minus infinity: a token it lacks."""
        logits = self.drafter[at]
        own = raw_row(logits)
        found.drafter(at, own, raw, None)
        unknown = np.flatnonzero(own.weights == 0)
        if len(unknown):
            found.parent["outside"][at] = float(raw.p(unknown).sum())
            if own.weights[found.parent["top"][at, 0]] == 0:
                found.parent["choice_rank"][at] = 0
        return float(own.p(self.tokens[at : at + 1])[0])


def _draft_notes(prob: Floats) -> DraftNotes:
    """The scores of a chain."""
    score = np.cumsum(np.log(np.maximum(prob, np.finfo(np.float32).tiny))).astype(np.float32)
    return DraftNotes(prob, score, NO_INTS, NO_INTS, NO_FLOATS)
