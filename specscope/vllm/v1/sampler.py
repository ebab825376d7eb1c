"""Hooks in vLLM's V1 sampler: they keep references to its tensors while one call of it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from specscope.trace.inside.hooking import ErrorGuard, named, wrap
from specscope.vllm.known import PLAIN, REJECTION, parameters_of
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
        self._guard.safely(wrap, module.Sampler, "sample", self._sample)

    def _install(self, module: ModuleType) -> None:
        self._cut = getattr(module, "apply_top_k_top_p", None)
        wrap(module.RejectionSampler, "forward", self._forward)
        wrap(module, "rejection_sample", self._rejection_sample)
        wrap(module, "generate_uniform_probs", self._keeps_value("coins", copy=True))  # some rules overwrite it
        wrap(module, "sample_recovered_tokens", self._recovers)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = named(original, parameters_of(REJECTION, "RejectionSampler.forward"))

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.call = None
            if self.listening:
                self.call = self._guard.safely(self._begun, arguments(args, kwargs))
            output = original(*args, **kwargs)
            if self.call is not None:
                self.call.output = output.sampled_token_ids
            return output

        return forward

    def _begun(self, given: Mapping[str, Any]) -> SamplerCall:
        metadata, sampling = given["metadata"], given["sampling_metadata"]
        return SamplerCall.of(metadata, given["draft_probs"], given["logits"], sampling, self._cut)

    def _rejection_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """It gets the target's logits after every rule. 0.33's lossy rules write into the drafts."""
        arguments = named(original, parameters_of(REJECTION, "rejection_sample"))

        def rejection_sample(*args: Any, **kwargs: Any) -> Any:
            if self.call is not None:
                self.call.target_logits = arguments(args, kwargs).get("target_logits")
            return original(*args, **kwargs)

        return rejection_sample

    def _keeps_value(self, name: str, *, copy: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                value = original(*args, **kwargs)
                if self.call is not None:
                    setattr(self.call, name, value.clone() if copy else value)
                return value

            return wrapped

        return make

    def _recovers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """It gets the normalised target."""
        arguments = named(original, parameters_of(REJECTION, "sample_recovered_tokens"))

        def sample_recovered_tokens(*args: Any, **kwargs: Any) -> Any:
            tokens = original(*args, **kwargs)
            if self.call is not None:
                self.call.target_probs = arguments(args, kwargs).get("target_probs")
            return tokens

        return sample_recovered_tokens

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Sampling overwrites the logits that it is given: temperature is applied in place."""

        arguments = named(original, parameters_of(PLAIN, "Sampler.sample"))

        def sample(*args: Any, **kwargs: Any) -> Any:
            if self.call is not None and self.call.bonus_logits is None:
                self.call.bonus_logits = self._guard.safely(_copied, arguments(args, kwargs))
            return original(*args, **kwargs)

        return sample


def _copied(given: Mapping[str, Any]) -> Any:
    """The logits of a call of the plain sampler; None where all requests are greedy."""
    return None if given["sampling_metadata"].all_greedy else given["logits"].clone()
