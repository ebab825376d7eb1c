"""Logits to the distribution that is really sampled from, at every node of a tree along that node's own path.

The order is vLLM's: logit bias, penalties, what may come at all, temperature, min-p, top-k, top-p, softmax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from specscope.kernels.tree_batch import put
from specscope.speculate.allowed import mask_
from specscope.speculate.verify.distribution import Chosen, Left, Residual
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import Ints

PREFILTER = 512  # top-p first looks among this many largest logits, and among more only where they lack mass
WIDER = 8  # how many times more
COLD = 1e-3  # divided by a higher temperature, no logit below 1e35 overflows
TINY = 2.0**-126  # the least temperature that float32 divides by


@dataclass(frozen=True)
class LogitRows:
    """One request's rows of logits, and what shapes them."""

    logits: Tensor  # [n, V] of any float dtype; never changed
    params: SamplingParams
    tokens: Sequence[int] = ()  # of prompt and output: this and what follows only with penalties
    prompt_len: int = 0
    paths: Sequence[Sequence[int]] = ()  # the drafted tokens on the way to each row
    allowed: Ints | None = None  # [n, V / 32] a bit for each token that may come (allowed.py); None: all may

    def shaped(self) -> Tensor:
        """After logit bias and penalties, float32 where there are any, minus infinity where a token may not come.

        Repetition penalty counts prompt and output, presence and frequency the output alone; a row's output is that of
        `tokens`, followed by its path.
        """
        rows, params = self.logits, self.params
        if params.penalised or params.logit_bias or self.allowed is not None:
            rows = rows.to(torch.float32, copy=True)
        bias = {token: value for token, value in params.logit_bias.items() if token < rows.shape[-1]}
        if bias:
            tokens, values = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
            rows[:, put(tokens, rows.device)] += put(values, rows.device)
        if params.penalised:
            _penalise_(rows, params, self.tokens, Counter(self.tokens[self.prompt_len :]), self.paths)
        return rows if self.allowed is None else mask_(rows, self.allowed)

    def distributions(self) -> list[Left]:
        """What is sampled from, a row each; a greedy request's choices are read from the device."""
        if self.params.greedy:
            return [Chosen(token) for token in argmax(self.shaped()).tolist()]
        return [Residual(row) for row in all_probabilities([self])]

    @property
    def dead(self) -> frozenset[int]:
        """Rows behind which nothing may come."""
        return frozenset() if self.allowed is None else frozenset(np.flatnonzero(~self.allowed.any(axis=1)).tolist())


@dataclass(frozen=True)
class TargetRows:
    """What the target says at the rows of a batch. Greedy requests need no probabilities, only its choices."""

    choices: Tensor  # int64 [G] the likeliest token at each row of greedy requests, one after another
    p: Tensor  # float32 [S, V] the distribution that is sampled from, at each row of the others


def target_rows(parts: Sequence[LogitRows]) -> TargetRows:
    """Of a batch of one request or more, in order. Nothing is read from a device."""
    logits = parts[0].logits
    greedy = [part.shaped() for part in parts if part.params.greedy]
    sampled = [part for part in parts if not part.params.greedy]
    choices = argmax(greedy[0] if len(greedy) == 1 else torch.cat(greedy)) if greedy else logits.new_empty(0).long()
    none = logits.new_empty(0, logits.shape[1], dtype=torch.float32)
    return TargetRows(choices, all_probabilities(sampled) if sampled else none)


def all_probabilities(parts: Sequence[LogitRows]) -> Tensor:
    """What one sampled request or more are sampled from, in order. Float32 [rows of all, V]."""
    logits = [part.shaped() for part in parts]
    out, start = logits[0].new_empty(sum(map(len, logits)), logits[0].shape[1], dtype=torch.float32), 0
    on_host = out.device.type == "cpu"  # whose caches hold one request's rows

    def alike(part: tuple[LogitRows, Tensor]) -> tuple[object, ...]:
        params = part[0].params
        return (id(part[0]) if on_host else 0), params.min_p, params.top_k, params.top_p

    for _, group in groupby(zip(parts, logits, strict=True), alike):
        first = start
        for part, rows in group:
            scaled(rows, part.params.temperature, out[start : (start := start + len(rows))])
        softmax_(out[first:start], part.params)
    return out


def argmax(rows: Tensor) -> Tensor:
    """The likeliest token of each row, the first of several. int64 [R]."""
    if rows.device.type != "cpu":
        return rows.argmax(-1)
    return torch.from_numpy(rows.float().numpy().argmax(-1))  # twenty times as fast as torch's


def scaled(rows: Tensor, temperature: float, out: Tensor | None = None) -> Tensor:
    """Logits [R, V] over a temperature above 0, float32, moved where they must be so that no quotient overflows.

    Where the temperature is small enough for that, each row's largest is 0 first: others go to minus infinity.
    """
    rows = rows.float()
    if temperature < COLD:
        rows = rows - rows.amax(-1, keepdim=True)
    return torch.div(rows, max(temperature, TINY), out=out)


def softmax_(rows: Tensor, params: SamplingParams) -> Tensor:
    """Softmax of [R, V] float32 logits, temperature in them, after min-p, top-k and top-p.

    In place: fresh memory costs a processor more than the softmax does.
    """
    if params.min_p > 0:
        rows.masked_fill_(rows < rows.amax(-1, keepdim=True) + math.log(params.min_p), -torch.inf)
    if 0 < params.top_k < rows.shape[-1]:
        rows.masked_fill_(rows < rows.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1:
        rows.masked_fill_(_beyond_top_p(rows, params), -torch.inf)
    return torch.softmax(rows, -1, out=rows)


def _beyond_top_p(rows: Tensor, params: SamplingParams) -> Tensor:
    """bool [R, V]: all but the fewest largest tokens whose mass reaches top_p and those that tie with the last."""
    probs, top_p = rows.softmax(-1), params.top_p
    if rows.device.type != "cpu":  # a look at the mass would be a wait
        return probs < _least_kept(probs.sort(descending=True)[0], top_p)[0]
    return probs < _least_on_host(probs, top_p, min(params.top_k or PREFILTER, PREFILTER, rows.shape[-1]))


def _least_on_host(probs: Tensor, top_p: float, first: int) -> Tensor:
    """[R, 1] the last probability that top-p keeps; looked for among the `first` largest, then among more."""
    least, lacks = _least_kept(probs.topk(first).values, top_p)
    if first < probs.shape[-1] and bool(lacks.any()):
        least[lacks] = _least_on_host(probs[lacks], top_p, min(first * WIDER, probs.shape[-1]))
    return least


def _least_kept(largest: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """[R, 1] the probability at which the sum of the `largest` reaches top_p, and bool [R]: where it does not."""
    mass = largest.double().cumsum(-1)
    last = torch.searchsorted(mass, mass.new_full((len(mass), 1), top_p)).clamp_(max=mass.shape[-1] - 1)
    return largest.gather(-1, last), mass[:, -1] < top_p


def _penalise_(
    rows: Tensor, params: SamplingParams, tokens: Sequence[int], output: Counter[int], paths: Sequence[Sequence[int]]
) -> None:
    """Repetition (Keskar et al. 2019), then frequency and presence penalties, on rows [R, V] in place.

    What all rows have in common is done at once. The few tokens on a row's own path follow, from what they were.
    """
    on_paths = [
        (row, token, output[token] + times)  # how often it is in that row's output
        for row, path in enumerate(paths)
        for token, times in Counter(path).items()
    ]
    row, token, times = put(np.array(on_paths, dtype=np.int64).reshape(-1, 3), rows.device).unbind(1)
    values = _repetition(rows[row, token], params)
    values -= params.frequency_penalty * times.to(rows.dtype) + params.presence_penalty
    if params.repetition_penalty != 1:
        seen = put(np.array([*{*tokens}], np.int64), rows.device)
        rows[:, seen] = _repetition(rows[:, seen], params)
    if params.frequency_penalty or params.presence_penalty:
        counted = np.array([*output.items()], np.int64).reshape(-1, 2)
        common, often = put(counted, rows.device).unbind(1)
        rows[:, common] -= params.frequency_penalty * often.to(rows.dtype) + params.presence_penalty
    rows[row, token] = values


def _repetition(values: Tensor, params: SamplingParams) -> Tensor:
    return torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
