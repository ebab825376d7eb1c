"""Rows of a call of V2's samplers, from the tensors that vLLM hands them; and the logits of greedy drafts.

There a request's rows of logits follow one another, the one behind its last draft among them. With an adaptive budget
only the device knows how many of its drafts each request kept. Drafts have logits only where they were sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.trace.inside.gather import Rows, Scores
from specscope.trace.inside.hooking import ErrorGuard, HookedCall, log, wrap

MOST = 2**27  # bytes that they may take; with more, they are left out


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


class DraftLogits:
    """What V2's drafter took its greedy drafts from, until the next step judges them.

    vLLM itself keeps the logits of sampled drafts, because its rule needs them. Ours lie in a tensor of the same shape,
    and are written where a CUDA graph records the drafter's work: no line of Python runs when it is replayed. Methods
    with a sampler of their own (dspark) have none.
    """

    def __init__(self, guard: ErrorGuard, wanted: Callable[[], bool]) -> None:
        """`wanted` is asked once, when the drafter first runs."""
        self._guard, self._wanted = guard, wanted
        self.tensor: Tensor | None = None  # [slots + 1, K, V]; the last one's are padding's, which has slot -1
        self._asked = False
        self._places: tuple[Tensor, Tensor] | None = None  # slot and depth of each row of logits that come next

    def sample_draft(self, call: HookedCall) -> Any:
        """Around the drafter's choice."""
        self._guard.safely(self._expect, call.given)
        try:
            return call()
        finally:
            self._places = None

    def _expect(self, given: dict[str, Any]) -> None:
        if given["draft_logits"] is not None:
            return
        speculator = given["self"]
        self._places = given["idx_mapping"].long(), given["draft_step"].long()

        def compute_draft_logits(call: HookedCall) -> Any:
            logits = call()
            self._guard.safely(self._keep, speculator, logits)
            return logits

        wrap(speculator, "compute_draft_logits", compute_draft_logits)  # of a subclass too

    def _keep(self, speculator: Any, logits: Tensor) -> None:
        if not self._asked:
            self._asked = True
            self.tensor = _made(speculator, logits) if self._wanted() else None
        if self.tensor is not None and self._places is not None:
            slots, steps = self._places
            self.tensor.index_put_((slots, steps.expand_as(slots)), logits)


def _made(speculator: Any, logits: Tensor) -> Tensor | None:
    """Not zeros: where this is first reached in a graph's capture, each replay would write them over the scores."""
    shape = speculator.max_num_reqs + 1, speculator.num_speculative_steps, logits.shape[1]
    size = shape[0] * shape[1] * shape[2] * logits.element_size()
    if size > MOST and logits.device.type != "cpu":
        log.warning("specscope: the drafter's scores are left out: they would take %d MiB", size >> 20)
        return None
    return torch.empty(shape, dtype=logits.dtype, device=logits.device)
