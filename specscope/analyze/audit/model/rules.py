"""The sampling rules, computed again: one function each over rows of logits, and a request's whole chain of them.

Independent of the engine. The order is that of the captures: logit bias, penalties, the form, temperature, min-p,
top-k, top-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specscope.analyze.audit.model.form import RequestForms
from specscope.trace.record.params import SamplingParams

REPETITION, PRESENCE, FREQUENCY = "repetition penalty", "presence penalty", "frequency penalty"
PENALTIES = (REPETITION, PRESENCE, FREQUENCY)
WIDE = 1024  # top-p first looks among this many largest logits


def biased(row: Tensor, bias: Mapping[int, float]) -> Tensor:
    """A row [V] with its logit bias."""
    known = {token: value for token, value in bias.items() if token < len(row)}
    if not known:
        return row
    tokens = torch.tensor(list(known), device=row.device)
    return row.index_add(0, tokens, torch.tensor(list(known.values()), dtype=row.dtype, device=row.device))


def penalised(rule: str, row: Tensor, value: float, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """A row [V] under one penalty: of what was there once, or of the output by how often each token came."""
    if value == (1.0 if rule == REPETITION else 0.0):
        return row
    times = Counter(output)
    tokens = torch.tensor(sorted({*prompt, *output} if rule == REPETITION else times), dtype=torch.long)
    here = row[tokens]
    if rule == REPETITION:
        return row.index_copy(0, tokens.to(row.device), torch.where(here > 0, here / value, here * value))
    count = torch.tensor([times[token] if rule == FREQUENCY else 1.0 for token in tokens.tolist()], device=row.device)
    return row.index_copy(0, tokens.to(row.device), here - value * count)


def least_p(rows: Tensor, share: Tensor, largest: Tensor | None = None) -> Tensor:
    """Without what has less than a share [R, 1] of the largest p, or of another; its own largest always stays."""
    own = rows.amax(-1, keepdim=True)
    cut = (rows < (own if largest is None else largest) + share.log()) & (rows < own)
    return rows.masked_fill(cut, -torch.inf)


def first_k(rows: Tensor, top_k: Tensor) -> Tensor:
    """Without what is below the k-th largest of its row; top_k [R, 1], 0 keeps all."""
    most = int(top_k.max())
    if most <= 0:
        return rows
    kth = rows.topk(min(most, rows.shape[1])).values
    place = (top_k.long() - 1).clamp(0, kth.shape[1] - 1)
    cut = (top_k > 0) & (top_k < rows.shape[1]) & (rows < kth.gather(1, place))
    return rows.masked_fill(cut, -torch.inf)


def first_p(rows: Tensor, top_p: Tensor, *, exclusive: bool = False) -> Tensor:
    """Only the fewest likeliest tokens whose mass reaches top_p [R, 1], and those that tie with the last.

    `exclusive`: without the one that reaches it.
    """
    if not bool((top_p < 1).any()):
        return rows
    probs = rows.softmax(-1)
    largest = probs.topk(min(WIDE, rows.shape[1])).values
    if bool((largest.sum(-1, keepdim=True) < top_p).any()):
        largest = probs.sort(-1, descending=True).values
    mass = largest.double().cumsum(-1)
    last = torch.searchsorted(mass, top_p.double()).clamp_(max=mass.shape[1] - 1)
    last = (last - 1).clamp(min=0) if exclusive else last
    return rows.masked_fill((top_p < 1) & (probs < largest.gather(-1, last)), -torch.inf)


@dataclass(frozen=True)
class Rules:
    """What shapes a request's logits."""

    params: SamplingParams
    prompt: Sequence[int]
    forms: RequestForms | None = None  # where outputs are limited

    @property
    def counts_output(self) -> bool:
        """Whether an output shapes what follows it."""
        return self.params.penalised or self.params.limited

    def shaped(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> Tensor:
        """Logits [R, V] after logit bias and penalties; `outputs`: what each row's penalties count as output."""
        rows = logits.float()
        if not self.params.logit_bias and not self.counts_output:
            return rows
        of_rows = outputs if self.counts_output else [()] * len(rows)
        return torch.stack([self._shaped(row, output) for row, output in zip(rows, of_rows, strict=True)])

    def _shaped(self, row: Tensor, output: Sequence[int]) -> Tensor:
        row = biased(row, self.params.logit_bias)
        for rule in PENALTIES:
            row = penalised(rule, row, getattr(self.params, rule.replace(" ", "_")), self.prompt, output)
        refused = self.forms.refused(self.params, output) if self.forms is not None and self.params.limited else None
        return row if refused is None else row.masked_fill(refused.to(row.device), -torch.inf)

    @property
    def truncates(self) -> bool:
        """Whether some tokens are left out; which ones may then depend on rounding."""
        params = self.params
        return not params.greedy and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1)

    def scores(self, shaped: Tensor) -> Tensor:
        """Shaped logits [R, V] over the temperature, the largest 0; minus infinity where a rule leaves a token out."""
        rows = shaped - shaped.amax(-1, keepdim=True)
        if self.params.greedy:
            return torch.where(rows == 0, 0.0, -torch.inf)
        return _truncated(rows / self.params.temperature, self.params)

    def bounds(self, shaped: Tensor, slack: float) -> tuple[Tensor, Tensor]:
        """The least and the largest p [V] of each token of one row [V] when logits may be off by `slack`.

        At the border of top-k, top-p and min-p, rounding decides which tokens are in, and that moves all others.
        """
        params, off = self.params, slack / self.params.temperature
        row = (shaped - shaped.max()) / params.temperature
        share = min(off / 4, 0.5)  # what p can be off by

        def moved(by: float) -> SamplingParams:
            """Cuts that take in more, or less where it is below 0."""
            min_p = params.min_p / (1 + by) if by > 0 else min(params.min_p * (1 - by), 0.999999)
            top_p = max(1e-9, min(1.0, params.top_p + by)) if params.top_p < 1 else 1.0
            return replace(params, top_p=top_p, min_p=min_p)

        low, high = torch.ones_like(row), torch.zeros_like(row)
        for rules, border in ((moved(share), -off), (params, 0.0), (moved(-share), off)):
            logits_left = _truncated(row[None], rules)[0]
            last = logits_left[logits_left > -torch.inf].min() + border
            inside = (row >= last) | (row == row.max())
            p = torch.where(inside, row, -torch.inf).softmax(-1)
            low, high = torch.minimum(low, p), torch.maximum(high, p)
        return low, high


def _truncated(rows: Tensor, params: SamplingParams) -> Tensor:
    def of_rows(value: float) -> Tensor:
        return torch.full((len(rows), 1), float(value), device=rows.device)

    if params.min_p > 0:
        rows = least_p(rows, of_rows(params.min_p))
    return first_p(first_k(rows, of_rows(params.top_k)), of_rows(params.top_p))
