"""Numbers of a request's part in a step, read on the host from the sampler's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
from torch import Tensor

from specscope.trace.record.parents import ParentsBuilder, Spread, spread, spread_without
from specscope.trace.record.records import ParentNotes
from specscope.trace.record.tree import Floats
from specscope.vllm.call import SamplerCall
from specscope.vllm.draft_vocabulary import DraftVocabulary
from specscope.vllm.numbers import NO_INTS, Judged, Numbers, assembled
from specscope.vllm.raw_rows import RawRows, of_draft
from specscope.vllm.scores import Passes


def judge(call: SamplerCall, request: int, drafter: Sequence[Tensor], *, full: bool) -> Judged:
    """Of a request's place in the batch. `drafter`: its logits [V] for each draft, or none."""
    return judge_batch(call, {request: ([row[None] for row in drafter], 0)}, full=full)[request]


def judge_batch(
    call: SamplerCall, passes: Mapping[int, Passes], *, full: bool, vocabulary: DraftVocabulary | None = None
) -> dict[int, Judged]:
    """Of the places that `passes` names: what the drafter gave for each.

    `vocabulary`: what is known of the drafter's from earlier calls.
    """
    first = list(accumulate(call.drafted, initial=0))
    told = call.draft_tokens.tolist()
    parts = {row: _One(call, row, first[row], told[first[row] : first[row + 1]], passes[row]) for row in passes}
    raw = RawRows(call, vocabulary or DraftVocabulary()) if full else None
    return {row: assembled(part.numbers(raw)) for row, part in parts.items()}


class _One:
    """One request while its numbers are read off."""

    def __init__(self, call: SamplerCall, request: int, first: int, told: list[int], passes: Passes) -> None:
        assert call.output is not None
        valid = next((at for at, token in enumerate(told) if token < 0), len(told))
        out = call.output[request].tolist()
        self.call, self.request, self.first, self.told = call, request, first, len(told)
        self.tokens = np.array(told[:valid], np.int32)
        self.passes, self.row = passes[0][:valid], passes[1]
        self.accepted = min(sum(token >= 0 for token in out) - 1, valid)
        self.final = out[self.accepted]
        self.tried = min(self.accepted + 1, valid)
        self.greedy = call.greedy(request)
        self.forced = call.forced.get(request)
        self.q = None if self.greedy or call.draft_probs is None else call.draft_probs[first : first + valid]

    def numbers(self, raw: RawRows | None) -> Numbers:
        """`raw`: what was given before any rule; None for lean evidence."""
        p, q, mass, drawn_from, whole = self._distributions()
        parents, prob = (None, None) if raw is None else self._noted(raw, drawn_from, whole)
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
            p = self._hits()
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
        if self.forced is not None:
            return float(self.final == self.forced.own)
        return float(self.final == self._choices[self.accepted]) if self.accepted < len(self.tokens) else 1.0

    def _hits(self) -> Floats:
        """[n] p of a greedy request's drafts: 1 at the target's choice; NaN where its logits are no numbers."""
        choices = self._choices
        assert self.call.target_logits is not None
        rows = self.call.target_logits[self.first : self.first + len(choices)].numpy()
        largest = np.take_along_axis(rows, choices[:, None], axis=1)[:, 0]  # NaN is the largest of all to argmax
        return np.where(np.isfinite(largest), choices == self.tokens, np.nan).astype(np.float32)

    @cached_property
    def _choices(self) -> np.ndarray:
        """The target's likeliest token at each of a greedy request's rows, untried ones too, whatever was accepted."""
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

    def _noted(
        self, rows: RawRows, drawn_from: Floats | None, whole: Floats | None
    ) -> tuple[ParentNotes, Floats | None]:
        """What target and drafter gave at the tried parents, and the drafter's scores of its tokens."""
        found, prob = ParentsBuilder(len(self.tokens), self.tried), np.zeros(len(self.tokens), np.float32)
        for at in range(self.tried):
            child, token = np.array([at]), self.tokens[at : at + 1]
            raw = rows.target(self.first + at)
            found.raw(at, raw, child, token)
            if self.greedy:
                found.chosen(at, int(self._choices[at]), child, token)
            else:
                found.target(at, self.call.target(self.first + at), child, token)
            if self.q is not None:
                found.drawn(at, self.q[at].numpy(), child, token)
            if at < len(self.passes):
                own, known = rows.drafter(self.passes[at], self.row)
                found.drafter(at, own, raw, known)
        for at, logits in enumerate(self.passes):
            prob[at] = of_draft(*rows.drafter(logits, self.row), self.tokens[at : at + 1])
        final_p = self._final_p(None) if whole is None else float(whole[self.final])
        parents = found.done(np.arange(-1, self.tried - 1, dtype=np.int32), self._final(found, drawn_from), final_p)
        return parents, prob if len(self.passes) else None

    def _final(self, found: ParentsBuilder, drawn_from: Floats | None) -> Spread:
        """Of what the final token was drawn from."""
        if drawn_from is None:
            return 0.0, 0.0
        at, known = self.accepted, None
        if self.q is None and at < len(self.tokens):  # the last tried row without its draft
            whole = float(found.parent["entropy"][at]), float(found.parent["varentropy"][at])
            row = self.call.target(self.first + at)
            known = spread_without(whole, float(row[self.tokens[at]]), float(row.sum()))
        return spread(drawn_from) if known is None else known
