"""A call of V1's rejection sampler, its rows, and the drafter's logits for what the next call judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specscope.trace.inside.gather import Range, Rows, Scores
from specscope.trace.inside.hooking import HookedCall, wrap
from specscope.vllm.witness import Witness

MOST = 2**27  # bytes of logits that may be kept on a device until the next step; with more, none are
Passes = tuple[Sequence[Tensor], int]  # the logits [., V] of each of its passes, and a request's row in them
NONE: Passes = ((), 0)


@dataclass
class SamplerCall:
    """T drafted rows of B requests, and V tokens. Tensors are vLLM's own: looked at, never changed."""

    logits: Tensor  # [T + B, V] the target's, before any rule but the grammar's mask
    drafted: list[int]  # [B] rows of each request
    draft_tokens: Tensor  # [T]; below 0 where a draft was found invalid
    draft_probs: Tensor | None  # float32 [T, V] what drafts were sampled from; None where they are deterministic
    target_rows: Tensor  # [T] the row of `logits` that judges each draft
    temperature: Tensor | None  # [B]; None where all are greedy
    top_p: Tensor | None  # [B]
    top_k: Tensor | None  # [B]
    cut: Callable[[Tensor, Tensor | None, Tensor | None], Tensor] | None  # vLLM's top-k and top-p
    bonus_logits: Tensor | None = None  # float32 [B, V] after penalties and masks, before temperature and cuts
    target_logits: Tensor | None = None  # float32 [T, V] after every rule
    target_probs: Tensor | None = None  # float32 [T, V] the same, normalised; None where all are greedy
    coins: Tensor | None = None  # [T]; None where all are greedy
    output: Tensor | None = None  # [B, longest + 1] accepted tokens and the final one, then -1

    def bonuses(self, low: int, high: int) -> Tensor:
        """[., V] p behind the last drafts of requests from..to, as vLLM's own sampler shapes it; of no meaning for
        greedy ones.
        """
        assert self.bonus_logits is not None
        assert self.temperature is not None
        temperature = self.temperature[low:high, None]
        rows = self.bonus_logits[low:high] / torch.where(temperature == 0, 1, temperature)
        k, p = (None if each is None else each[low:high] for each in (self.top_k, self.top_p))
        if self.cut is not None and not (k is None and p is None):
            rows = self.cut(rows, k, p)
        return rows.softmax(1)


def rows_of(call: SamplerCall, drafter: Sequence[Passes]) -> Rows:
    """Rows of a call of V1's sampler. `drafter`: for each request the drafter's passes [., V] and its row in them."""
    output, target = call.output, call.target_logits
    assert output is not None
    assert target is not None
    device = call.logits.device
    drafted = upload(call.drafted, device)
    accepted = (output >= 0).sum(1) - 1
    greedy = torch.ones_like(drafted).bool() if call.temperature is None else call.temperature[: len(drafted)] == 0
    made = Rows(
        tokens=call.draft_tokens.long(),
        request=torch.repeat_interleave(drafted, output_size=len(call.draft_tokens)),
        first=drafted.cumsum(0) - drafted,
        drafted=drafted,
        accepted=accepted,
        final=output.gather(1, accepted.clamp_min(0)[:, None])[:, 0].long(),
        greedy=greedy,
        raw=lambda places: call.logits[call.target_rows[places].long()].float(),
        target=lambda low, high: target[low:high],
        vocabulary=call.logits.shape[1],
        coins=call.coins,
    )
    if call.target_probs is not None:
        _sampled(made, call, call.target_probs)
    made.scores, made.scored = _scores(call.drafted, drafter, device)
    return made


def _sampled(rows: Rows, call: SamplerCall, p: Tensor) -> None:
    """Fill in what only calls with sampled requests have. `p` [T, V]: the target's, after every rule."""
    rows.probs, rows.whole = lambda low, high: p[low:high], call.bonuses
    if not len(p):
        return
    at_draft, rejected = rows.ended.clamp_max(len(p) - 1).long(), rows.accepted < rows.drafted

    def whole(low: int, high: int) -> Tensor:
        return torch.where(rejected[low:high, None], p[at_draft[low:high]], call.bonuses(low, high))

    rows.whole = whole
    if (q := call.draft_probs) is not None:
        rows.q = lambda low, high: q[low:high]
        rows.whole_q = lambda low, high: q[at_draft[low:high]]


def _scores(drafted: Sequence[int], drafter: Sequence[Passes], device: torch.device) -> tuple[list[Scores], list[int]]:
    """By pass of the drafter: which rows it scored, and which of its own rows did."""
    scored = [min(len(passes), length) for (passes, _), length in zip(drafter, drafted, strict=False)]
    scores, firsts = [], list(accumulate(drafted, initial=0))
    for depth in range(max(scored, default=0)):
        some = [request for request, length in enumerate(scored) if length > depth]
        both = upload([firsts[request] + depth for request in some] + [drafter[request][1] for request in some], device)
        rows, theirs = both[: len(some)], both[len(some) :]
        scores.append(Scores(rows, _rows_at(drafter[some[0]][0][depth], theirs)))
    return scores, scored


def _rows_at(logits: Tensor, places: Tensor) -> Range:
    """The rows of a pass at some of these places."""
    return lambda low, high: logits[places[low:high]].float()


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """int64, without waiting for the device."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class DrafterScores:
    """Keeps the logits of the drafter's own model while it drafts; n-gram and suffix have none."""

    def __init__(self) -> None:
        self._passes: list[Tensor] = []
        self._scored: dict[str, Passes] = {}
        self._drafts = self._sampled = False

    def begin(self, runner: Any, witness: Witness) -> None:
        """The drafter begins to draft for the next step. With lean evidence its scores are of no use."""
        model = getattr(getattr(runner, "drafter", None), "model", None)
        if witness.full and hasattr(model, "compute_logits"):
            wrap(model, "compute_logits", self._compute_logits)
        self._sampled = witness.run.speculation.get("draft_sample_method") == "probabilistic"
        self._passes, self._drafts = [], True

    def end(self, names: Sequence[str]) -> None:
        """Called when it has drafted, for these rows of the batch."""
        passes, self._passes, self._drafts = self._passes, [], False
        if len(passes) == 1 and names and len(passes[0]) > len(names):  # a block drafter: all depths in one pass
            passes = list(passes[0].reshape(len(names), -1, passes[0].shape[1]).unbind(1))
        fits = all(logits.device.type == "cpu" for logits in passes) or sum(logits.nbytes for logits in passes) <= MOST
        if fits and all(len(logits) == len(names) for logits in passes):
            self._scored = {name: (passes, row) for row, name in enumerate(names)}

    def take(self, name: str) -> Passes:
        """A request's passes, which are given once."""
        return self._scored.pop(name, NONE)

    def _compute_logits(self, call: HookedCall) -> Any:
        """Of the drafter's model. Sampling divides logits by the temperature in place."""
        logits = call()
        if self._drafts and isinstance(logits, Tensor):
            self._passes.append(logits.clone() if self._sampled else logits)
        return logits
