"""Logits to the distribution that is really sampled from, at every node of a tree along that node's own path.

The order is vLLM's: logit bias, penalties, temperature, min-p, top-k, top-p, softmax.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.model.backend import Backend
from specscope.speculate.counts import TokenCounts
from specscope.speculate.verify.distribution import Dense, Distribution, Point
from specscope.trace.params import SamplingParams

PREFILTER = 512  # top-p first looks among this many largest logits, and sorts the whole row only where they lack mass


def distributions(
    logits: Tensor,
    params: SamplingParams,
    counts: TokenCounts,
    paths: Sequence[Sequence[int]],
    backend: Backend = Backend.TORCH,
) -> list[Distribution]:
    """One distribution a row. logits [R, V] of any float dtype; paths: the drafted tokens on the way to each row.

    Repetition penalty counts prompt and output, presence and frequency the output alone; a row's output is what
    `counts` counts, followed by its path. Float32 throughout. The logits are not changed. With the triton backend all
    rows are Dense, greedy ones too, so that nothing is read from the device.
    """
    plain = not params.penalised and not params.logit_bias
    rows = logits if plain else shaped(logits, params, counts, paths)
    if params.greedy and backend is Backend.TRITON:
        best = rows.argmax(-1, keepdim=True)
        ones = torch.zeros(rows.shape, device=rows.device).scatter_(1, best, 1.0)
        return [Dense(row) for row in ones]
    if params.greedy:
        return [Point(token) for token in rows.argmax(-1).tolist()]
    if backend is Backend.TRITON and params.top_k <= 0 and params.top_p >= 1:
        from specscope.kernels import sampling  # triton is imported only where it runs

        return [Dense(row) for row in sampling.probabilities(rows, params.temperature, params.min_p)]
    return [Dense(row) for row in probabilities(rows.float() / params.temperature, params)]


def shaped(logits: Tensor, params: SamplingParams, counts: TokenCounts, paths: Sequence[Sequence[int]]) -> Tensor:
    """Logits [R, V] after logit bias and penalties, float32; arguments as in `distributions`."""
    rows = logits.float()
    if params.logit_bias:
        rows = _with_bias(rows, params)
    if params.penalised:
        rows = _penalised(rows, params, counts, paths)
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
        rows = _top_p(rows, params.top_p)
    return rows.softmax(-1)


def _top_p(rows: Tensor, top_p: float) -> Tensor:
    """Of each row the fewest largest tokens whose mass reaches top_p; ties with the last one kept stay too."""
    probs = rows.softmax(-1)
    on_host = rows.device.type == "cpu"  # where a look at the mass costs nothing; on a device it would be a wait
    largest = probs.topk(min(PREFILTER, rows.shape[-1]), dim=-1).values if on_host else probs.sort(descending=True)[0]
    mass = largest.double().cumsum(-1)
    if on_host and largest.shape[-1] < rows.shape[-1] and bool((mass[:, -1] < top_p).any()):
        largest = probs.sort(dim=-1, descending=True).values
        mass = largest.double().cumsum(-1)
    wanted = mass.new_full((len(rows), 1), top_p)
    last = torch.searchsorted(mass, wanted).clamp_(max=largest.shape[-1] - 1)
    return rows.masked_fill(probs < largest.gather(-1, last), -torch.inf)


def _with_bias(rows: Tensor, params: SamplingParams) -> Tensor:
    inside = {token: value for token, value in params.logit_bias.items() if token < rows.shape[-1]}
    rows = rows.clone()
    rows[:, list(inside)] += torch.tensor(list(inside.values()), dtype=rows.dtype, device=rows.device)
    return rows


def _penalised(rows: Tensor, params: SamplingParams, counts: TokenCounts, paths: Sequence[Sequence[int]]) -> Tensor:
    """Repetition (Keskar et al. 2019), then frequency and presence penalties, on rows [R, V].

    What all rows have in common is done at once. The few tokens on a row's own path follow, from what they were.
    """
    own = torch.tensor(list(_on_paths(counts, paths)), dtype=torch.int64)
    own = own.view(-1, 3).to(rows.device)
    out, seen = rows.clone(), _tensor(counts.seen, rows)
    if params.repetition_penalty != 1:
        out[:, seen] = _repetition(out[:, seen], params)
    token, times = (_tensor(x, rows) for x in counts.output)
    out[:, token] -= params.frequency_penalty * times.to(rows.dtype) + params.presence_penalty
    row, token, times = own.unbind(1)
    values = _repetition(rows[row, token], params)
    out[row, token] = values - (params.frequency_penalty * times.to(rows.dtype) + params.presence_penalty)
    return out


def _on_paths(counts: TokenCounts, paths: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """(row, token, how often it is in that row's output) of each token on each path."""
    for row, path in enumerate(paths):
        for token, times in Counter(path).items():
            yield row, token, counts.times(token) + times


def _repetition(values: Tensor, params: SamplingParams) -> Tensor:
    return torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)


def _tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
