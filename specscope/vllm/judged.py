"""Numbers of a request's part in a step, read on the host from the sampler's tensors, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specscope.trace.parents import Indices, ParentsBuilder, RawRow
from specscope.trace.records import ParentNotes
from specscope.trace.tree import Floats, Ints
from specscope.vllm.call import Call
from specscope.vllm.draft_vocabulary import DraftVocabulary
from specscope.vllm.numbers import NO_INTS, Judged, Numbers, assembled


def judge(
    call: Call, request: int, drafter: Sequence[Tensor], *, full: bool, vocabulary: DraftVocabulary | None = None
) -> Judged:
    """Of a request's place in the batch. `drafter`: its logits [V] for each draft, or none.

    `vocabulary`: what is known of the drafter's from earlier calls.
    """
    first = sum(call.drafted[:request])
    told = call.draft_tokens[first : first + call.drafted[request]].tolist()
    tokens = np.array(told[: next((at for at, token in enumerate(told) if token < 0), len(told))], np.int32)
    own = drafter[: len(tokens)]
    return assembled(
        _One(call, request, first, tokens, len(told), own, vocabulary or DraftVocabulary(), full).numbers()
    )


class _One:
    """One request while its numbers are read off."""

    def __init__(
        self,
        call: Call,
        request: int,
        first: int,
        tokens: np.ndarray,
        told: int,
        drafter: Sequence[Tensor],
        vocabulary: DraftVocabulary,
        full: bool,
    ) -> None:
        assert call.output is not None
        row = call.output[request]
        self.call, self.request, self.first = call, request, first
        self.tokens, self.told, self.drafter, self.full = tokens, told, drafter, full
        self.accepted = min(int((row >= 0).sum()) - 1, len(tokens))
        self.final = int(row[self.accepted])
        self.tried = min(self.accepted + 1, len(tokens))
        self.greedy = call.greedy(request)
        self.forced = call.forced.get(request)
        self.vocabulary = vocabulary
        self.q = None if self.greedy or call.draft_probs is None else call.draft_probs[first : first + len(tokens)]

    def numbers(self) -> Numbers:
        p, q, mass, drawn_from, whole = self._distributions()
        parents, prob = self._noted(drawn_from, whole)
        return Numbers(
            tokens=self.tokens,
            accepted=self.accepted,
            final=self.final,
            p=p,
            q=q,
            sampled=self.q is not None,
            coin=self._coins(),
            mass=mass,
            final_p=self._final_p(drawn_from),
            parents=parents,
            prob=prob,
            invalid=self.told - len(self.tokens),
            forced=NO_INTS if self.forced is None else self.forced.marks(self.tried, len(self.tokens)),
        )

    def _distributions(self) -> tuple[Floats, Floats, float, Floats | None, Floats | None]:
        """(p and q of the drafts, mass of the residual, what the final token was drawn from, p in full behind it)."""
        n, call = len(self.tokens), self.call
        q = np.ones(n, np.float32)
        if self.greedy and not n:
            return q, q, 0.0, None, None
        if self.q is not None:
            q = self.q.numpy()[np.arange(n), self.tokens]
        if self.greedy:
            p = (self._choices() == self.tokens).astype(np.float32)
            return p, q, 1.0 if self.accepted == n else float(1 - p[self.accepted]), None, None
        rows = range(self.first, self.first + n)
        if call.target_probs is not None:
            p = call.target_probs.numpy()[np.array(rows, np.int64), self.tokens]
        else:
            p = np.array([call.target(row)[token] for row, token in zip(rows, self.tokens, strict=True)], np.float32)
        if self.accepted == self.told:
            whole = call.bonus(self.request)
            return p, q, 0.0, whole, whole
        left, whole = self._residual()
        mass = float(left.sum())
        return p, q, mass, left / mass if mass > 0 else whole, whole

    def _residual(self) -> tuple[Floats, Floats]:
        """(What is left of p where a draft was rejected, p). An invalid draft takes nothing away but what q does."""
        at, call = self.first + self.accepted, self.call
        whole = call.target(at)
        left = whole.copy()
        if call.draft_probs is not None:
            np.maximum(left - call.draft_probs[at].numpy(), 0, out=left)
        elif self.accepted < len(self.tokens):
            left[self.tokens[self.accepted]] = 0
        return left, whole

    def _final_p(self, drawn_from: Floats | None) -> float:
        """Of the final token in what it was drawn from; a greedy target has all of it at one token."""
        if drawn_from is not None:
            return float(drawn_from[self.final])
        return 1.0 if self.forced is None else float(self.final == self.forced.own)

    def _choice(self, at: int) -> int:
        """The likeliest at a greedy request's tried row: what vLLM went by, unless it was forced."""
        if self.forced is not None and at in self.forced.nodes:
            return int(self._choices()[at])
        if at < self.accepted:
            return int(self.tokens[at])
        return self.final if self.forced is None else self.forced.own

    def _choices(self) -> np.ndarray:
        """The target's likeliest token at each of a greedy request's rows, untried ones too."""
        assert self.call.target_logits is not None
        rows = self.call.target_logits[self.first : self.first + len(self.tokens)]
        found: np.ndarray = np.argmax(rows.numpy(), axis=-1)
        return found

    def _coins(self) -> np.ndarray:
        """0 where none was tossed: greedy requests have none."""
        if self.greedy or self.call.coins is None:
            return np.zeros(len(self.tokens))
        coins = self.call.coins[self.first : self.first + len(self.tokens)]
        return coins.numpy().astype(np.float64)

    def _noted(self, drawn_from: Floats | None, whole: Floats | None) -> tuple[ParentNotes | None, Floats | None]:
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
            own, known = self.vocabulary.read(self.drafter[at])
            prob[at] = _of_draft(own, known, self.tokens[at : at + 1])
        final_p = self._final_p(None) if whole is None else float(whole[self.final])
        parents = found.done(np.arange(-1, self.tried - 1, dtype=np.int32), drawn_from, final_p)
        return parents, prob if len(self.drafter) else None

    def _drafter(self, found: ParentsBuilder, at: int, raw: RawRow) -> float:
        """What the drafter itself gave at a parent: its probability of the draft."""
        own, known = self.vocabulary.read(self.drafter[at])
        found.drafter(at, own, raw, known)
        return _of_draft(own, known, self.tokens[at : at + 1])


def _of_draft(own: RawRow, known: Indices | None, token: Ints) -> float:
    """The drafter's probability of a token [1]; 0 of one that it does not know."""
    if known is None:
        return float(own.p(token)[0])
    place = np.searchsorted(known, token)
    return float(own.p(place)[0]) if place[0] < len(known) and known[place[0]] == token[0] else 0.0
