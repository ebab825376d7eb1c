"""The evidence of V1's tensors where they lie on the host."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specscope.trace.inside.chain import Numbers, assembled
from specscope.trace.inside.gathered import Judgements
from specscope.trace.inside.host import DrafterRow, HostChain
from specscope.trace.record.notes import Indices, RawRow
from specscope.trace.record.tree import Floats, Ints
from specscope.vllm.v1.sampler import SamplerCall
from specscope.vllm.v1.scores import Passes


class DraftVocabulary:
    """Which tokens a drafter knows, found in its first logits: vLLM gives the others minus infinity.

    A head of 8,192 tokens is read five times as fast so.
    """

    def __init__(self) -> None:
        self._known: Indices | None = None

    def reduced(self, logits: Floats) -> tuple[Floats, Indices | None]:
        """(Rows [., V] over the tokens that the drafter knows, these tokens; `logits` and None where it knows all)."""
        finite = np.count_nonzero(logits[0] > -np.inf)  # one row tells of all: what a drafter knows is its own
        if finite == logits.shape[1]:
            return logits, None
        if self._known is None or len(self._known) != finite:
            self._known = np.flatnonzero(logits[0] > -np.inf)
        return np.take(logits, self._known, axis=1), self._known


def judge_here(
    call: SamplerCall, passes: Mapping[int, Passes], *, full: bool, vocabulary: DraftVocabulary | None = None
) -> Judgements:
    """The judgements of the places in the batch that `passes` names (what the drafter gave for each).

    `vocabulary`: what is known of the drafter's from earlier calls.
    """
    raw, first = _RawRows(call, vocabulary or DraftVocabulary()), list(accumulate(call.drafted, initial=0))
    judged = {
        request: assembled(_numbers(call, request, first[request], raw, given, full))
        for request, given in passes.items()
    }
    return Judgements((), judged)


class _RawRows:
    """What target and drafter gave before any rule."""

    def __init__(self, call: SamplerCall, vocabulary: DraftVocabulary) -> None:
        self._logits, self._rows, self._vocabulary = call.logits, call.target_rows.tolist(), vocabulary
        self._row = torch.empty(call.logits.shape[1])
        self._passes: dict[int, tuple[Floats, Floats, Indices | None]] = {}  # by the tensor's id, which the call holds

    def target(self, draft: int) -> RawRow:
        """At the row that judges a draft; good until the next is asked for, which is put in its place."""
        torch.softmax(self._logits[self._rows[draft]].float(), 0, out=self._row)
        row = self._row.numpy()
        return RawRow(row, float(row.sum()))  # torch's own sum over a vocabulary is off by some 1e-5

    def drafter(self, logits: Tensor, row: int) -> DrafterRow:
        """(A row of a drafter's pass [., V] over the tokens that the drafter knows, these; None where it knows all)."""
        if id(logits) not in self._passes:
            weights, known = self._vocabulary.reduced(logits.float().numpy())
            weights = weights - weights.max(1, keepdims=True)
            np.exp(weights, out=weights)
            self._passes[id(logits)] = weights, weights.sum(1), known
        weights, masses, known = self._passes[id(logits)]
        return RawRow(weights[row], float(masses[row])), known


def _numbers(call: SamplerCall, request: int, first: int, raw: _RawRows, passes: Passes, full: bool) -> Numbers:
    """Of one request, whose rows begin at `first`. An invalid draft takes nothing away but what q does."""
    assert call.output is not None
    drafts = call.draft_tokens[first : first + call.drafted[request]].numpy()
    invalid = np.flatnonzero(drafts < 0)
    n = int(invalid[0]) if len(invalid) else len(drafts)
    tokens, rows = drafts[:n].astype(np.int32), np.arange(first, first + n)
    out = call.output[request].tolist()
    accepted = min(sum(token >= 0 for token in out) - 1, n)
    greedy, last = call.greedy(request), first + accepted
    chain = HostChain(tokens, accepted, out[accepted], np.zeros(n, np.float32), np.zeros(n))
    if greedy:
        chain.choices, chain.p = _choices(call, rows, tokens)
    else:
        is_bonus = accepted == call.drafted[request]
        chain.target = lambda index: call.target(first + index)
        if call.target_probs is not None:
            chain.p = call.target_probs.numpy()[rows, tokens]
        else:
            chain.p = np.array([chain.target(index)[token] for index, token in enumerate(tokens)], np.float32)
        chain.whole = call.bonus(request) if is_bonus else call.target(last)
        if call.coins is not None:
            chain.coin = call.coins[first : first + n].double().numpy()
        if call.draft_probs is not None:
            chain.q = call.draft_probs[first : first + n].numpy()
            chain.taken = None if is_bonus else call.draft_probs[last].numpy()
    logits, row = passes[0][:n] if full else (), passes[1]
    prob = np.zeros(n, np.float32) if logits else None
    for index, given in enumerate(logits):
        prob[index] = _of_draft(*raw.drafter(given, row), tokens[index : index + 1])  # type: ignore[index]
    return chain.numbers(
        lambda index: raw.target(first + index),
        lambda index: raw.drafter(logits[index], row) if index < len(logits) else None,
        full=full,
        prob=prob,
        invalid=len(drafts) - n,
    )


def _choices(call: SamplerCall, rows: Indices, tokens: Ints) -> tuple[Ints, Floats]:
    """(The target's likeliest tokens, [n] p of the drafts): NaN where its logits are no numbers."""
    assert call.target_logits is not None
    logits = call.target_logits.numpy()[rows]
    choices = np.argmax(logits, axis=-1)
    largest = np.take_along_axis(logits, choices[:, None], axis=1)[:, 0]  # NaN is the largest of all to argmax
    return choices, np.where(np.isfinite(largest), choices == tokens, np.nan).astype(np.float32)


def _of_draft(drafter_row: RawRow, known: Indices | None, token: Indices) -> float:
    """The drafter's probability of a token [1]; 0 of one that it does not know."""
    if known is None:
        return float(drafter_row.p(token)[0])
    place = np.searchsorted(known, token)
    return float(drafter_row.p(place)[0]) if place[0] < len(known) and known[place[0]] == token[0] else 0.0
