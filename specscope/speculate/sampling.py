"""Logits to the distribution that is really sampled from, at every node of a tree along that node's own path.

The order is vLLM's: logit bias, penalties, temperature, min-p, top-k, top-p, softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specscope.speculate.distribution import Dense, Distribution, Point
from specscope.trace.params import SamplingParams

PREFILTER = 512  # top-p first looks among this many largest logits, and sorts the whole row only where they lack mass


def distributions(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], paths: Sequence[Sequence[int]]
) -> list[Distribution]:
    """One distribution a row. logits [R, V] of any float dtype; paths: the drafted tokens on the way to each row.

    Repetition penalty counts prompt and output, presence and frequency the output alone; a row's output is
    `output` followed by its path. Float32 throughout. The logits are not changed.
    """
    if params.greedy and not params.penalised and not params.logit_bias:
        return [Point(token) for token in logits.argmax(-1).tolist()]
    rows = shaped(logits, params, prompt, output, paths)
    if params.greedy:
        return [Point(token) for token in rows.argmax(-1).tolist()]
    return [Dense(row) for row in probabilities(rows / params.temperature, params)]


def shaped(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], paths: Sequence[Sequence[int]]
) -> Tensor:
    """Logits [R, V] after logit bias and penalties, float32; arguments as in `distributions`."""
    rows = logits.float()
    if params.logit_bias:
        rows = _with_bias(rows, params)
    if params.penalised:
        rows = torch.stack(
            [_penalise(row, params, prompt, [*output, *path]) for row, path in zip(rows, paths, strict=True)]
        )
    return rows


def probabilities(rows: Tensor, params: SamplingParams) -> Tensor:
    """Softmax of [R, V] float32 logits after min-p, top-k and top-p; temperature is already in them."""
    if params.min_p > 0:
        floor = rows.max(-1, keepdim=True).values + torch.log(torch.tensor(params.min_p))
        rows = rows.masked_fill(rows < floor, -torch.inf)
    if 0 < params.top_k < rows.shape[-1]:
        least = rows.topk(params.top_k, dim=-1).values[:, -1:]
        rows = rows.masked_fill(rows < least, -torch.inf)
    if params.top_p < 1:
        rows = torch.stack([_top_p(row, params.top_p) for row in rows])
    return rows.softmax(-1)


def _top_p(row: Tensor, top_p: float) -> Tensor:
    """Keep the fewest largest tokens whose mass reaches top_p; ties with the last one kept stay too."""
    probs = row.softmax(-1)
    largest = probs.topk(min(PREFILTER, len(row))).values
    mass = largest.double().cumsum(0)
    if float(mass[-1]) < top_p and len(largest) < len(row):
        largest = probs.sort(descending=True).values
        mass = largest.double().cumsum(0)
    last = min(int(torch.searchsorted(mass, top_p)), len(largest) - 1)
    return row.masked_fill(probs < largest[last], -torch.inf)


def _with_bias(rows: Tensor, params: SamplingParams) -> Tensor:
    inside = {token: value for token, value in params.logit_bias.items() if token < rows.shape[-1]}
    rows = rows.clone()
    rows[:, list(inside)] += torch.tensor(list(inside.values()), dtype=rows.dtype, device=rows.device)
    return rows


def _penalise(row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Repetition (Keskar et al. 2019), then frequency and presence penalties, on one row [V]."""
    row = row.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor([*prompt, *output], dtype=torch.int64, device=row.device).unique()
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.presence_penalty != 0 or params.frequency_penalty != 0):
        tokens, counts = torch.tensor(output, dtype=torch.int64, device=row.device).unique(return_counts=True)
        row[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    return row
