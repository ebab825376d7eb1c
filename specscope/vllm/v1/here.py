"""What evidence needs of V1's tensors where they lie on the host, read row by row in numpy.

The same columns as gather.py's. Torch's operations over whole batches take ten times as long here, and wake its
threads, which are slow to meet when cores are busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specscope.trace.record.notes import (
    TOP,
    Indices,
    ParentsBuilder,
    RawRow,
    Spread,
    spread,
    spread_without,
)
from specscope.trace.record.tree import Floats
from specscope.vllm.call import SamplerCall
from specscope.vllm.gathered import Gathered, GatheredTables, empty_tables
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


def gather_here(
    call: SamplerCall, passes: Mapping[int, Passes], *, full: bool, vocabulary: DraftVocabulary | None = None
) -> Gathered:
    """The numbers of the places in the batch that `passes` names (what the drafter gave for each), and of no others.

    `vocabulary`: what is known of the drafter's from earlier calls.
    """
    count = len(call.drafted)
    scored = [len(passes[row][0]) if row in passes else 0 for row in range(count)]
    likeliest = min(TOP, call.logits.shape[1])
    rows, scores, ends = empty_tables(likeliest, (sum(call.drafted), sum(call.drafted) if full else 0, count))
    tables = GatheredTables(
        rows,
        scores,
        ends,
        likeliest=likeliest,
        scored=scored if full else (),
        sampled=call.draft_probs is not None,
        full=full,
    )
    first = list(accumulate(call.drafted, initial=0))
    rows["token"][:] = call.draft_tokens.numpy()
    ends["first"][:], ends["drafted"][:] = first[:-1], call.drafted
    raw = _RawRows(call, vocabulary or DraftVocabulary()) if full else None
    for request, given in passes.items():
        _Filled(tables, call, request, first[request]).fill(raw, given)
    return Gathered(lambda: tables, count)


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

    def drafter(self, logits: Tensor, row: int) -> tuple[RawRow, Indices | None]:
        """(A row of a drafter's pass [., V] over the tokens that the drafter knows, these; None where it knows all)."""
        if id(logits) not in self._passes:
            weights, known = self._vocabulary.reduced(logits.float().numpy())
            weights = weights - weights.max(1, keepdims=True)
            np.exp(weights, out=weights)
            self._passes[id(logits)] = weights, weights.sum(1), known
        weights, masses, known = self._passes[id(logits)]
        return RawRow(weights[row], float(masses[row])), known


class _Filled:
    """The columns of one request."""

    def __init__(self, tables: GatheredTables, call: SamplerCall, request: int, first: int) -> None:
        assert call.output is not None
        drafts = tables.rows["token"][first : first + call.drafted[request]]
        invalid = np.flatnonzero(drafts < 0)
        self.n = int(invalid[0]) if len(invalid) else len(drafts)
        self.tables, self.call, self.request, self.first = tables, call, request, first
        self.tokens = drafts[: self.n]
        out = call.output[request].tolist()
        self.accepted = min(sum(token >= 0 for token in out) - 1, self.n)
        self.final = out[self.accepted]
        self.tried = min(self.accepted + 1, self.n)
        self.greedy = call.greedy(request)
        self.q = None if self.greedy or call.draft_probs is None else call.draft_probs[first : first + self.n]

    def fill(self, raw: _RawRows | None, passes: Passes) -> None:
        """`raw`: what was given before any rule; None for lean evidence."""
        rows, ends = self.tables.rows, self.tables.ends
        some, here = slice(self.first, self.first + self.n), np.arange(self.n)
        ends["accepted"][self.request], ends["final"][self.request] = self.accepted, self.final
        ends["greedy"][self.request] = self.greedy
        if self.q is not None:
            rows["q"][some] = self.q.numpy()[here, self.tokens]
        if self.greedy:
            rows["choice"][some], rows["p"][some] = self._choices()
        else:
            rows["p"][some] = self._p()
            if self.call.coins is not None:
                rows["coin"][some] = self.call.coins[some].numpy()
        notes = None if raw is None else self._notes(raw, passes)
        if not self.greedy:
            self._fill_end(notes)

    def _choices(self) -> tuple[Indices, Floats]:
        """(The target's likeliest tokens, [n] p of the drafts): NaN where its logits are no numbers."""
        assert self.call.target_logits is not None
        logits = self.call.target_logits[self.first : self.first + self.n].numpy()
        choices = np.argmax(logits, axis=-1)
        largest = np.take_along_axis(logits, choices[:, None], axis=1)[:, 0]  # NaN is the largest of all to argmax
        return choices, np.where(np.isfinite(largest), choices == self.tokens, np.nan).astype(np.float32)

    def _p(self) -> Floats:
        """[n] p of the drafts of a sampled request."""
        rows = np.arange(self.first, self.first + self.n)
        if self.call.target_probs is not None:
            probs: Floats = self.call.target_probs.numpy()[rows, self.tokens]
            return probs
        each = [self.call.target(int(row))[token] for row, token in zip(rows, self.tokens, strict=True)]
        return np.array(each, np.float32)

    def _fill_end(self, notes: ParentsBuilder | None) -> None:
        """What a sampled request's final token was drawn from. An invalid draft takes nothing away but what q does."""
        end, index, call = self.tables.ends, self.first + self.accepted, self.call
        mass, known = 0.0, None
        if self.accepted == call.drafted[self.request]:
            drawn = whole = call.bonus(self.request)
        else:
            whole = call.target(index)
            left = whole.copy()
            if call.draft_probs is not None:
                np.maximum(left - call.draft_probs[index].numpy(), 0, out=left)
            elif self.accepted < self.n:
                token = self.tokens[self.accepted]
                left[token] = 0
                known = None if notes is None else self._without(notes, float(whole[token]), float(whole.sum()))
            mass = float(left.sum())
            drawn = left / mass if mass > 0 else whole
        end["mass"][self.request] = mass
        end["final_p"][self.request], end["final_target_p"][self.request] = drawn[self.final], whole[self.final]
        if notes is not None:
            both = spread(drawn) if known is None else known
            end["final_entropy"][self.request], end["final_varentropy"][self.request] = both

    def _without(self, notes: ParentsBuilder, p: float, total: float) -> Spread | None:
        """The spread of the last tried row without its draft, from that of the row."""
        index = self.accepted
        whole = float(notes.parent["entropy"][index]), float(notes.parent["varentropy"][index])
        return spread_without(whole, p, total)

    def _notes(self, raw: _RawRows, passes: Passes) -> ParentsBuilder:
        """What target and drafter gave at the tried parents, and the drafter's scores of its tokens."""
        logits, row = passes[0][: self.n], passes[1]
        notes, rows, scores = ParentsBuilder(self.n, self.tried), self.tables.rows, self.tables.scores
        for index in range(self.tried):
            child, token = np.array([index]), self.tokens[index : index + 1]
            weights = raw.target(self.first + index)
            notes.raw(index, weights, child, token)
            if self.greedy:
                notes.chosen(index, int(rows["choice"][self.first + index]), child, token)
            else:
                notes.target(index, self.call.target(self.first + index), child, token)
            if self.q is not None:
                notes.drawn(index, self.q[index].numpy(), child, token)
            if index < len(logits):
                drafter, known = raw.drafter(logits[index], row)
                notes.drafter(index, drafter, weights, known)
        for index, given in enumerate(logits):
            scores["prob"][self.first + index] = _of_draft(*raw.drafter(given, row), self.tokens[index : index + 1])
        for name, column in (notes.node | notes.parent).items():
            table, some = scores if name in scores else rows, column[: self.tried]
            if some.size:
                table[name][self.first : self.first + len(some)] = some
        return notes


def _of_draft(drafter_row: RawRow, known: Indices | None, token: Indices) -> float:
    """The drafter's probability of a token [1]; 0 of one that it does not know."""
    if known is None:
        return float(drafter_row.p(token)[0])
    place = np.searchsorted(known, token)
    return float(drafter_row.p(place)[0]) if place[0] < len(known) and known[place[0]] == token[0] else 0.0
