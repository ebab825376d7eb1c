"""Hooks in vLLM's V1 sampler: they keep references to its tensors while one call of it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specscope.trace.inside.hooking import ErrorGuard, HookedCall
from specscope.vllm.known import PLAIN, REJECTION, Hooks
from specscope.vllm.v1.call import SamplerCall


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
