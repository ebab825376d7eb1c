"""Hooks in vLLM's V1 sampler: they keep references to its tensors while one call of it runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from specscope.trace.inside.hooking import ErrorGuard, HookedCall
from specscope.vllm.known import PLAIN, REJECTION, wrap_known
from specscope.vllm.v1.call import SamplerCall


class SamplerHooks:
    """`call` is the rejection sampler's call that runs now, or the last one that ran while `listening`."""

    def __init__(self, guard: ErrorGuard) -> None:
        self._guard = guard
        self.listening = False  # set by the runner's hooks around a real step: vLLM also calls the sampler to warm up
        self.call: SamplerCall | None = None
        self._cut: Any = None

    def install(self, module: ModuleType) -> None:
        """Into vllm.v1.sample.rejection_sampler."""
        self._guard.safely(self._install, module)

    def install_plain(self, module: ModuleType) -> None:
        """Into vllm.v1.sample.sampler: it samples the bonus token."""
        self._guard.safely(wrap_known, PLAIN, module.Sampler, "Sampler.sample", self._sample)

    def _install(self, module: ModuleType) -> None:
        self._cut = getattr(module, "apply_top_k_top_p", None)
        wrap_known(REJECTION, module.RejectionSampler, "RejectionSampler.forward", self._forward)
        for name, hook in (
            ("rejection_sample", self._rejection_sample),
            ("generate_uniform_probs", self._uniform_probs),
            ("sample_recovered_tokens", self._recovers),
        ):
            wrap_known(REJECTION, module, name, hook)

    def _forward(self, call: HookedCall) -> Any:
        self.call = self._guard.safely(self._begun, call.given) if self.listening else None
        output = call()
        if self.call is not None:
            self.call.output = output.sampled_token_ids
        return output

    def _begun(self, given: Mapping[str, Any]) -> SamplerCall:
        metadata, sampling = given["metadata"], given["sampling_metadata"]
        return SamplerCall.of(metadata, given["draft_probs"], given["logits"], sampling, self._cut)

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
        if self.call is not None and self.call.bonus_logits is None:
            self.call.bonus_logits = self._guard.safely(_copied, call.given)
        return call()


def _copied(given: Mapping[str, Any]) -> Any:
    """The logits of a call of the plain sampler; None where all requests are greedy."""
    return None if given["sampling_metadata"].all_greedy else given["logits"].clone()
