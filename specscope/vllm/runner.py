"""Hooks in vLLM's V1 model runner: they tell the witness when a step begins, what was judged, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from specscope.vllm.guard import Guard, wrap
from specscope.vllm.sampler import SamplerHooks
from specscope.vllm.witness import Witness

if TYPE_CHECKING:
    from specscope.vllm.debugger import Debugger


class RunnerHooks:
    """One for a process. The witness is made with the first step, when the runner knows its model."""

    def __init__(
        self,
        guard: Guard,
        sampler: SamplerHooks,
        make_witness: Callable[[Any], Witness | None],
        debugger: Debugger | None = None,
        listen: Callable[[Any], None] = lambda _: None,
        share: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """`listen` opens the debugger's socket, when a runner has been made and before any request.

        `share` gives the sampler's output to the other ranks. All of them call it in each step, whatever went wrong.
        """
        self._guard, self._sampler, self._make = guard, sampler, make_witness
        self._debugger, self._listen, self._share = debugger, listen, share
        self._witness: Witness | None = None
        self._asked = False  # whether a witness was to be made; only one rank has one

    def install(self, module: ModuleType) -> None:
        """Into vllm.v1.worker.gpu_model_runner."""
        self._guard.safely(self._install, module.GPUModelRunner)

    def _install(self, runner: type) -> None:
        if self._debugger is not None:
            wrap(runner, "__init__", self._init)
        wrap(runner, "execute_model", self._execute_model)
        wrap(runner, "_sample", self._sample)
        wrap(runner, "sample_tokens", self._sample_tokens)
        wrap(runner, "propose_draft_token_ids", self._propose)

    def _of(self, runner: Any) -> Witness | None:
        if not self._asked:
            self._asked = True
            self._witness = self._guard.safely(self._make, runner)
        return None if self._guard.is_off else self._witness

    def _init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(runner: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(runner, *args, **kwargs)
            self._guard.safely(self._listen, runner)

        return __init__

    def _execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            witness, began = self._of(runner), time.time_ns()
            if witness is not None:
                self._guard.safely(witness.begin, scheduler_output)
            output = original(runner, scheduler_output, *args, **kwargs)
            if witness is not None:
                witness.phase("forward", began, time.time_ns())
            return output

        return execute_model

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(runner: Any, logits: Any, metadata: Any) -> Any:
            witness, began = self._witness, time.time_ns()
            self._sampler.listening = witness is not None and not self._guard.is_off
            try:
                output = original(runner, logits, metadata)
            finally:
                self._sampler.listening = False
            if witness is not None:
                witness.phase("verify", began, time.time_ns())
                call, self._sampler.call = self._sampler.call, None
                self._guard.safely(witness.judged, runner, call)
                if self._debugger is not None:
                    self._guard.safely(self._debugger.judged, witness, runner, call, output)
            if self._debugger is not None:
                self._shared(output)
            return output

        return _sample

    def _shared(self, output: Any) -> None:
        try:
            self._share(output)
        except Exception as error:
            self._guard.caught("share", error)

    def _propose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def propose_draft_token_ids(runner: Any, *args: Any, **kwargs: Any) -> Any:
            witness, began = self._witness, time.time_ns()
            if witness is not None:
                self._guard.safely(witness.drafts, runner)
            drafts = original(runner, *args, **kwargs)
            if witness is not None:
                witness.phase("draft", began, time.time_ns())
                self._guard.safely(witness.drafted, runner)
            return drafts

        return propose_draft_token_ids

    def _sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(runner, *args, **kwargs)
            if self._witness is not None:
                self._witness.phase("commit", 0, time.time_ns())
            return output

        return sample_tokens
