"""A request's sampling rules computed again, by transformers' own processors: independent of the engine.

The order is that of the captures: logit bias, penalties, the form, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specscope.analyze.audit.model.form import RequestForms
from specscope.trace.record.params import SamplingParams


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
        params, rows = self.params, logits.float()
        if params.logit_bias:
            rows = self._biased(rows)
        if params.penalised:
            rows = torch.cat([self._penalised(row[None], output) for row, output in zip(rows, outputs, strict=True)])
        return self._limited(rows, outputs) if params.limited else rows

    def _limited(self, rows: Tensor, outputs: Sequence[Sequence[int]]) -> Tensor:
        """The logits with minus infinity where the request's form, or its minimum length, forbids a token."""
        if self.forms is None:
            return rows
        rows = rows.clone()
        for row, output in zip(rows, outputs, strict=True):
            refused = self.forms.refused(self.params, output)
            if refused is not None:
                row[refused.to(row.device)] = -torch.inf
        return rows

    def _biased(self, rows: Tensor) -> Tensor:
        bias: Any = {(token,): value for token, value in self.params.logit_bias.items() if token < rows.shape[1]}
        return SequenceBiasLogitsProcessor(bias)(_nothing(rows), rows) if bias else rows

    def _penalised(self, row: Tensor, output: Sequence[int]) -> Tensor:
        params = self.params
        if params.repetition_penalty != 1:
            seen = torch.tensor([[*self.prompt, *output]], device=row.device)
            row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, row)
        if params.frequency_penalty or params.presence_penalty:  # transformers has neither
            row = row.clone()
            for token, times in Counter(output).items():
                row[0, token] -= params.frequency_penalty * times + params.presence_penalty
        return row

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
        rows = TemperatureLogitsWarper(float(self.params.temperature))(_nothing(rows), rows)
        return _truncated(rows, self.params)

    def bounds(self, shaped: Tensor, slack: float) -> tuple[Tensor, Tensor]:
        """The least and the largest p [V] of each token of one row [V] when logits may be off by `slack`.

        At the border of top-k, top-p and min-p, rounding decides which tokens are in, and that moves all others.
        """
        params, off = self.params, slack / self.params.temperature
        row = (shaped - shaped.max()) / params.temperature
        share = min(off / 4, 0.5)  # what p can be off by
        loose = replace(
            params,
            top_p=min(1.0, params.top_p + share) if params.top_p < 1 else 1.0,
            min_p=params.min_p / (1 + share),
        )
        tight = replace(
            params,
            top_p=max(1e-9, params.top_p - share) if params.top_p < 1 else 1.0,
            min_p=min(params.min_p * (1 + share), 0.999999),
        )
        low, high = torch.ones_like(row), torch.zeros_like(row)
        for rules, border in ((loose, -off), (params, 0.0), (tight, off)):
            logits_left = _truncated(row[None], rules)[0]
            last = logits_left[logits_left > -torch.inf].min() + border
            inside = (row >= last) | (row == row.max())
            p = torch.where(inside, row, -torch.inf).softmax(-1)
            low, high = torch.minimum(low, p), torch.maximum(high, p)
        return low, high


def _nothing(rows: Tensor) -> Any:  # noqa: ANN401
    """Stands in for the tokens before, which these processors ignore."""
    return torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)


def _truncated(rows: Tensor, params: SamplingParams) -> Tensor:
    if params.min_p > 0:
        rows = MinPLogitsWarper(params.min_p)(_nothing(rows), rows)
    if 0 < params.top_k < rows.shape[-1]:
        rows = TopKLogitsWarper(params.top_k)(_nothing(rows), rows)
    if params.top_p < 1:
        rows = TopPLogitsWarper(params.top_p)(_nothing(rows), rows)
    return rows
