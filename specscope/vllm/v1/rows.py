"""Rows of a call of V1's rejection sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specscope.trace.inside.gather import Rows, Scores
from specscope.vllm.v1.sampler import SamplerCall


def rows_of(call: SamplerCall, drafter: Sequence[tuple[Sequence[Tensor], int]]) -> Rows:
    """Rows of a call of V1's sampler. `drafter`: for each request the drafter's passes [., V] and its row in them."""
    assert call.output is not None
    device, count = call.logits.device, len(call.drafted)
    drafted = upload(call.drafted, device)
    first = drafted.cumsum(0) - drafted
    request = torch.repeat_interleave(drafted, output_size=len(call.draft_tokens))
    accepted = (call.output >= 0).sum(1) - 1
    greedy = torch.ones(count, dtype=torch.bool, device=device)
    if call.temperature is not None:
        greedy = call.temperature[:count] == 0
    made = Rows(
        tokens=call.draft_tokens.long(),
        request=request,
        first=first,
        drafted=drafted,
        accepted=accepted,
        final=call.output.gather(1, accepted.clamp_min(0)[:, None])[:, 0].long(),
        greedy=greedy,
        raw=lambda places: call.logits[call.target_rows[places].long()].float(),
        target=lambda low, high: _some(call.target_logits)[low:high],
        probs=None,
        q=None,
        whole=None,
        whole_q=None,
        vocabulary=call.logits.shape[1],
        coins=call.coins,
    )
    if call.temperature is not None and call.bonus_logits is not None:
        _sampled(made, call)
    made.scores, made.scored = _scores(call.drafted, drafter, device)
    return made


def _sampled(rows: Rows, call: SamplerCall) -> None:
    """Fill in what only calls with sampled requests have."""
    last = len(rows.tokens) - 1
    at_draft = (rows.ended.clamp_max(last) if last >= 0 else rows.ended).long()

    def probs(low: int, high: int) -> Tensor:
        return call.target_probs[low:high] if call.target_probs is not None else rows.target(low, high).softmax(1)

    def whole(low: int, high: int) -> Tensor:
        behind = call.bonuses(low, high)
        if last < 0:
            return behind
        places = at_draft[low:high]
        judged = (
            call.target_probs[places] if call.target_probs is not None else _some(call.target_logits)[places].softmax(1)
        )
        rejected = rows.accepted[low:high] < rows.drafted[low:high]
        return torch.where(rejected[:, None], judged, behind)

    rows.probs, rows.whole = probs, whole
    if (q := call.draft_probs) is not None and last >= 0:
        rows.q = lambda low, high: q[low:high]
        rows.whole_q = lambda low, high: q[at_draft[low:high]]


def _scores(
    drafted: Sequence[int], drafter: Sequence[tuple[Sequence[Tensor], int]], device: torch.device
) -> tuple[list[Scores], list[int]]:
    """By pass of the drafter: which rows it scored, and which of its own rows did."""
    scored = [min(len(passes), length) for (passes, _), length in zip(drafter, drafted, strict=False)]
    scores, ranges = [], [sum(drafted[:request]) for request in range(len(scored))]
    for depth in range(max(scored, default=0)):
        some = [request for request, length in enumerate(scored) if length > depth]
        of = drafter[some[0]][0][depth]
        both = upload([ranges[request] + depth for request in some] + [drafter[request][1] for request in some], device)
        rows, drafter_rows = both[: len(some)], both[len(some) :]
        scores.append(
            Scores(rows, lambda low, high, of=of, drafter_rows=drafter_rows: of[drafter_rows[low:high]].float())  # type: ignore[misc]
        )
    return scores, scored


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """int64, without waiting for the device."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
