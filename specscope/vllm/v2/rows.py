"""Rows of a call of V2's samplers, from the tensors that vLLM hands them.

There a request's rows of logits follow one another, the one behind its last draft among them. With an adaptive budget
only the device knows how many of its drafts each request kept. Drafts have logits only where they were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.trace.inside.gather import Rows, Scores


@dataclass
class Verified:
    """N rows of B requests. Arguments and results of V2's `_verify`, or of the plain sampler's `sample`."""

    logits: Tensor  # [N, V] before any rule but the grammar's mask
    processed: Tensor  # [N, V] after every rule
    draft_logits: Tensor | None  # [slots, K, V] before temperature; None where drafts are deterministic
    tokens: Tensor  # [N] the token fed at each row: the last sampled one, then the drafts; below 0: an invalid draft
    pos: Tensor  # int64 [N] and where
    cu_num_logits: Tensor  # [B + 1] each request's first row
    idx_mapping: Tensor  # [B] the request's slot
    idx_mapping_np: np.ndarray
    expanded_idx_mapping: Tensor  # [N]
    expanded_local_pos: Tensor  # [N] the row's place among its request's
    sampled: Tensor  # [B, K + 1]; what lies beyond `num_sampled` is not written
    num_sampled: Tensor  # [B]
    states: Any  # vLLM's SamplingStates, by slot
    scores: Tensor | None = None  # [slots, K, V] what deterministic drafts were the likeliest of
    by_block: bool = False  # verified as one block
    step_seeds: bool = True  # and then each draft's coin has a seed of its own, as since 0.33
    confidence: Tensor | None = None  # [slots, K] what a drafter thinks of its drafts


def rows_of_verified(call: Verified) -> Rows:
    """The rows of a call of V2's sampler. Nothing here waits for the device."""
    cu = call.cu_num_logits.long()
    first, count = cu[:-1], len(call.logits)
    drafted = cu.diff() - 1
    request = torch.searchsorted(cu[1:].contiguous(), torch.arange(count, device=cu.device), right=True)
    request = request.clamp_max(len(first) - 1)
    place = call.expanded_local_pos.long()
    fed = torch.cat([call.tokens[1:], call.tokens.new_full((1,), -1)]).long()
    accepted = (call.num_sampled.long() - 1).clamp_min(0)
    temperature = call.states.temperature.gpu[call.idx_mapping]
    vocabulary = call.logits.shape[1]
    own = call.scores if call.draft_logits is None else call.draft_logits
    if own is not None:
        vocabulary = min(vocabulary, own.shape[2])
    made = Rows(
        tokens=torch.where(place < drafted[request], fed, -1),
        request=request,
        first=first,
        drafted=drafted,
        accepted=accepted,
        final=call.sampled.gather(1, accepted[:, None])[:, 0].long(),
        greedy=temperature == 0,
        raw=lambda places: call.logits[places, :vocabulary].float(),
        target=lambda low, high: call.processed[low:high, :vocabulary].float(),
        probs=None,
        q=None,
        whole=None,
        whole_q=None,
        vocabulary=vocabulary,
        seeds=call.states.seeds.gpu[call.idx_mapping],
        positions=call.pos,
        longest=call.sampled.shape[1] - 1,
        by_step=call.by_block,
        step_seeds=call.by_block and call.step_seeds,
    )
    if (call.states.temperature.np[call.idx_mapping_np] != 0).any():
        _sampled(made, call, place, temperature)
    if own is not None:
        slot, step = call.expanded_idx_mapping, place.clamp_max(own.shape[1] - 1)
        every = torch.arange(count, device=cu.device)
        made.scores = [Scores(every, lambda low, high: own[slot[low:high], step[low:high], :vocabulary].float())]
        made.scored = [own.shape[1]] * len(first)
    if call.confidence is not None:
        last = call.confidence.shape[1] - 1
        made.confidence = call.confidence[call.expanded_idx_mapping, place.clamp_max(last)]
    return made


def _sampled(rows: Rows, call: Verified, place: Tensor, temperature: Tensor) -> None:
    """Fill in what only calls with sampled requests have."""
    rows.probs = lambda low, high: rows.target(low, high).softmax(1)
    rows.whole = lambda low, high: call.processed[rows.ended[low:high], : rows.vocabulary].float().softmax(1)
    if call.draft_logits is None:
        return
    draft_logits, heat = call.draft_logits, torch.where(temperature == 0, 1, temperature)
    step, slot = place.clamp_max(draft_logits.shape[1] - 1), call.expanded_idx_mapping

    def q(places: Tensor) -> Tensor:
        return (
            draft_logits[slot[places], step[places], : rows.vocabulary].float() / heat[rows.request[places], None]
        ).softmax(1)

    def whole_q(low: int, high: int) -> Tensor:
        places = rows.ended[low:high]
        return torch.where((rows.tokens[places] < 0)[:, None], 0, q(places))  # an invalid draft takes nothing away

    rows.q = lambda low, high: q(torch.arange(low, high, device=draft_logits.device))
    rows.whole_q = whole_q
