"""Hooks in vLLM's V1 sampler: they keep references to its tensors while one call of it runs. And that call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.trace.inside.hooking import ErrorGuard, HookedCall
from specscope.trace.record.tree import Floats
from specscope.vllm.known import PLAIN, REJECTION, Hooks


@dataclass
class SamplerCall:
    """T drafted rows of B requests, and V tokens. Tensors are vLLM's own: looked at, never changed."""

    logits: Tensor  # [T + B, V] the target's, before any rule but the grammar's mask
    drafted: list[int]  # [B] rows of each request
    draft_tokens: Tensor  # [T]; below 0 where a draft was found invalid
    draft_probs: Tensor | None  # float32 [T, V] what drafts were sampled from; None where they are deterministic
    target_rows: Tensor  # [T] the row of `logits` that judges each draft
    bonus_rows: Tensor  # [B] and the one behind each request's last
    temperature: Tensor | None  # [B]; None where all are greedy
    top_p: Tensor | None  # [B]
    top_k: Tensor | None  # [B]
    cut: Callable[[Tensor, Tensor | None, Tensor | None], Tensor] | None  # vLLM's top-k and top-p
    bonus_logits: Tensor | None = None  # float32 [B, V] after penalties and masks, before temperature and cuts
    target_logits: Tensor | None = None  # float32 [T, V] after every rule
    target_probs: Tensor | None = None  # float32 [T, V] the same, normalised; None where all are greedy
    coins: Tensor | None = None  # [T]; None where all are greedy
    output: Tensor | None = None  # [B, longest + 1] accepted tokens and the final one, then -1

    def greedy(self, request: int) -> bool:
        """Whether the request has temperature 0."""
        return self.temperature is None or float(self.temperature[request]) == 0

    def target(self, draft: int) -> Floats:
        """[V] p at a drafted row, after every rule."""
        if self.target_probs is not None:
            return self.target_probs[draft].numpy()
        assert self.target_logits is not None
        return _softmax(self.target_logits[draft])

    def bonus(self, request: int) -> Floats:
        """[V] p behind the last draft of a sampled request."""
        return _softmax(self._behind(request, request + 1)[0])

    def bonuses(self, low: int, high: int) -> Tensor:
        """[., V] p behind the last drafts of requests from..to; of no meaning for greedy ones."""
        return self._behind(low, high).softmax(1)

    def _behind(self, low: int, high: int) -> Tensor:
        """[., V] logits behind the last drafts of requests from..to, as vLLM's own sampler shapes them."""
        assert self.bonus_logits is not None
        assert self.temperature is not None
        temperature = self.temperature[low:high, None]
        rows = self.bonus_logits[low:high] / torch.where(temperature == 0, 1, temperature)
        k = None if self.top_k is None else self.top_k[low:high]
        p = None if self.top_p is None else self.top_p[low:high]
        return rows if self.cut is None or (k is None and p is None) else self.cut(rows, k, p)


def _softmax(logits: Tensor) -> Floats:
    """[V] in numpy, of a row that may hold minus infinities."""
    row: Floats = logits.numpy().astype(np.float32)
    row -= row.max()
    np.exp(row, out=row)
    row /= row.sum()
    return row


class SamplerHooks:
    """`call` is the rejection sampler's call that runs now, or the last one that ran while `listening`."""

    def __init__(self, guard: ErrorGuard) -> None:
        self._guard = guard
        self.listening = False  # set by the runner's hooks around a real step: vLLM also calls the sampler to warm up
        self.call: SamplerCall | None = None

    @property
    def targets(self) -> Mapping[str, Hooks]:
        """What goes around which function, by module. The plain sampler draws the bonus token."""
        return {
            PLAIN: {"Sampler.sample": self._sample},
            REJECTION: {
                "RejectionSampler.forward": self._forward,
                "rejection_sample": self._rejection_sample,
                "generate_uniform_probs": self._uniform_probs,
                "sample_recovered_tokens": self._recovers,
            },
        }

    def _forward(self, call: HookedCall) -> Any:
        self.call = self._guard.safely(self._begun, call.given) if self.listening else None
        output = call()
        if self.call is not None:
            self.call.output = output.sampled_token_ids
        return output

    def _begun(self, given: Mapping[str, Any]) -> SamplerCall:
        metadata, sampling = given["metadata"], given["sampling_metadata"]
        return SamplerCall(
            logits=given["logits"],
            drafted=list(metadata.num_draft_tokens),
            draft_tokens=metadata.draft_token_ids.clone(),  # 0.33's lossy rule writes into them
            draft_probs=given["draft_probs"],
            target_rows=metadata.target_logits_indices,
            bonus_rows=metadata.bonus_logits_indices,
            temperature=_kept(sampling.temperature),
            top_p=_kept(sampling.top_p),
            top_k=_kept(sampling.top_k),
            cut=getattr(sys.modules.get(REJECTION), "apply_top_k_top_p", None),
        )

    def _rejection_sample(self, call: HookedCall) -> Any:
        """It gets the target's logits after every rule. 0.33's lossy rules write into the drafts."""
        if self.call is not None:
            self.call.target_logits = call.given.get("target_logits")
        return call()

    def _uniform_probs(self, call: HookedCall) -> Any:
        coins = call()
        if self.call is not None:
            self.call.coins = coins.clone()  # some rules overwrite them
        return coins

    def _recovers(self, call: HookedCall) -> Any:
        """It gets the normalised target."""
        tokens = call()
        if self.call is not None:
            self.call.target_probs = call.given.get("target_probs")
        return tokens

    def _sample(self, call: HookedCall) -> Any:
        """Sampling overwrites the logits that it is given: temperature is applied in place."""
        given, ours = call.given, self.call
        if ours is not None and ours.bonus_logits is None and not given["sampling_metadata"].all_greedy:
            ours.bonus_logits = given["logits"].clone()
        return call()


def _kept(of_requests: Tensor | None) -> Tensor | None:
    """A copy of what vLLM writes anew for each batch."""
    return None if of_requests is None else of_requests.clone()
