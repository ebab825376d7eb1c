"""The evidence of V1's tensors where they lie on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specscope.trace.inside.chain import Numbers, assembled
from specscope.trace.inside.gathered import Judgements
from specscope.trace.inside.host import DrafterRow, DraftVocabulary, HostChain
from specscope.trace.record.notes import Indices, RawRow
from specscope.trace.record.tree import Floats, Ints
from specscope.vllm.v1.rows import Passes, SamplerCall


def judge_here(
    call: SamplerCall, passes: Mapping[int, Passes], *, full: bool, vocabulary: DraftVocabulary | None = None
) -> Judgements:
    """The judgements of the places in the batch that `passes` names (what the drafter gave for each).

    `vocabulary`: what is known of the drafter's from earlier calls.
    """
    raw, firsts = _RawRows(call, vocabulary or DraftVocabulary()), list(accumulate(call.drafted, initial=0))
    judged = {at: assembled(_numbers(call, at, firsts[at], raw, given, full)) for at, given in passes.items()}
    return Judgements((), judged)


class _RawRows:
    """What target and drafter gave before any rule."""

    def __init__(self, call: SamplerCall, vocabulary: DraftVocabulary) -> None:
        self._logits, self._rows, self._vocabulary = call.logits, call.target_rows.tolist(), vocabulary
        self._row = torch.empty(call.logits.shape[1])
        self._passes: dict[int, Callable[[int], DrafterRow]] = {}  # by the tensor's id, which the call holds

    def target(self, draft: int) -> RawRow:
        """At the row that judges a draft; good until the next is asked for, which is put in its place."""
        torch.softmax(self._logits[self._rows[draft]].float(), 0, out=self._row)
        row = self._row.numpy()
        return RawRow(row, float(row.sum()))  # torch's own sum over a vocabulary is off by some 1e-5

    def drafter(self, logits: Tensor, row: int) -> DrafterRow:
        """A row of a drafter's pass [., V]."""
        if id(logits) not in self._passes:
            self._passes[id(logits)] = self._vocabulary.rows(logits.float().numpy())
        return self._passes[id(logits)](row)


def _numbers(call: SamplerCall, request: int, first: int, raw: _RawRows, passes: Passes, full: bool) -> Numbers:
    """Of one request, whose rows begin at `first`. An invalid draft takes nothing away but what q does."""
    assert call.output is not None
    drafts = call.draft_tokens[first : first + call.drafted[request]].numpy()
    invalid = np.flatnonzero(drafts < 0)
    n = int(invalid[0]) if len(invalid) else len(drafts)
    tokens, rows = drafts[:n].astype(np.int32), np.arange(first, first + n)
    out = call.output[request].tolist()
    accepted = min(sum(token >= 0 for token in out) - 1, n)
    chain = HostChain(tokens, accepted, out[accepted], np.zeros(n, np.float32), np.zeros(n))
    if call.temperature is None or float(call.temperature[request]) == 0:
        chain.choices, chain.p = _choices(call, rows, tokens)
    else:
        assert call.target_probs is not None
        p, last, is_bonus = call.target_probs.numpy(), first + accepted, accepted == len(drafts)
        chain.target, chain.p = lambda index: p[first + index], p[rows, tokens]
        chain.whole = call.bonuses(request, request + 1)[0].numpy() if is_bonus else p[last]
        if call.coins is not None:
            chain.coin = call.coins[rows].double().numpy()
        if call.draft_probs is not None:
            q = call.draft_probs.numpy()
            chain.q, chain.taken = q[first : first + n], None if is_bonus else q[last]
    given = [raw.drafter(logits, passes[1]) for logits in passes[0][:n]] if full else []
    return chain.numbers(lambda index: raw.target(first + index), given, full=full, invalid=len(drafts) - n)


def _choices(call: SamplerCall, rows: Indices, tokens: Ints) -> tuple[Ints, Floats]:
    """(The target's likeliest tokens, [n] p of the drafts): NaN where its logits are no numbers."""
    assert call.target_logits is not None
    logits = call.target_logits.numpy()[rows]
    choices = np.argmax(logits, axis=-1)
    largest = np.take_along_axis(logits, choices[:, None], axis=1)[:, 0]  # NaN is the largest of all to argmax
    return choices, np.where(np.isfinite(largest), choices == tokens, np.nan).astype(np.float32)
