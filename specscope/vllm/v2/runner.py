"""Hooks in vLLM's V2 model runner and its samplers. V2 runs on GPUs only: what is gathered is read a step later."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from specscope.trace.inside.chain import NO_INTS
from specscope.trace.inside.hooking import ErrorGuard, wrap
from specscope.vllm.gather import gather
from specscope.vllm.gathered import Gathered, Judgements
from specscope.vllm.hooks import wrap_loaded
from specscope.vllm.v2.rows import Verified, rows_of_verified
from specscope.vllm.witness import BatchPlace, Witness


class V2Hooks:
    """One for a process."""

    def __init__(self, guard: ErrorGuard, make_witness: Callable[[Any], Witness | None]) -> None:
        self._guard, self._make = guard, make_witness
        self._witness: Witness | None = None
        self._asked = False
        self._batch: Any = None  # vLLM's InputBatch while a sampler runs in a real step
        self._listens = False  # between execute_model of a real step and the end of its sample_tokens
        self._calls: list[Gathered] = []
        self._confidence: Any = None  # with an adaptive budget: what the drafter thinks of its drafts, by slot
        self._fused = False  # whether the plain sampler cut by top-k and top-p inside its kernel

    def install_runner(self, module: ModuleType) -> None:
        """Into vllm.v1.worker.gpu.model_runner."""
        self._guard.safely(wrap_loaded, module.GPUModelRunner, self._of)
        self._guard.safely(wrap, module.GPUModelRunner, "execute_model", self._execute_model)
        self._guard.safely(wrap, module.GPUModelRunner, "sample_tokens", self._sample_tokens)

    def install_rejection(self, module: ModuleType) -> None:
        """Into vllm.v1.worker.gpu.spec_decode.rejection_sampler."""
        self._guard.safely(wrap, module.RejectionSampler, "__call__", self._sampler)
        self._guard.safely(wrap, module.RejectionSampler, "_verify", self._verify)

    def install_plain(self, module: ModuleType) -> None:
        """Into vllm.v1.worker.gpu.sample.sampler: a step without drafts goes through it alone."""
        self._guard.safely(wrap, module.Sampler, "__call__", self._sampler)
        self._guard.safely(wrap, module.Sampler, "sample", self._sample)
        self._guard.safely(wrap, module.Sampler, "_sample_random", self._sample_random)

    def _of(self, runner: Any) -> Witness | None:
        if not self._asked:
            self._asked = True
            self._witness = self._guard.safely(self._make, runner)
        return None if self._guard.is_off else self._witness

    def _execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            dummy = bool(kwargs.get("dummy_run", args[1] if len(args) > 1 else False))
            witness, began = None if dummy else self._of(runner), time.time_ns()
            if witness is not None:
                self._guard.safely(witness.begin, scheduler_output)
            output = original(runner, scheduler_output, *args, **kwargs)
            if witness is not None:
                witness.phase("forward", began, time.time_ns())
            self._listens = witness is not None and scheduler_output.total_num_scheduled_tokens > 0
            return output

        return execute_model

    def _sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._listens:
                adaptive = getattr(runner, "adaptive_verification", None)
                self._confidence = getattr(adaptive, "_confidence_probs", None)
            try:
                output = original(runner, *args, **kwargs)
            finally:
                listened, self._listens = self._listens, False
            if listened and self._witness is not None:
                self._witness.phase("draft", 0, time.time_ns())
            return output

        return sample_tokens

    def _sampler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap either sampler: what it calls meanwhile gathers."""

        def __call__(sampler: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if not self._listens or self._witness is None or self._guard.is_off:
                return original(sampler, logits, input_batch, *args, **kwargs)
            self._batch, self._calls, began = input_batch, [], time.time_ns()
            try:
                output = original(sampler, logits, input_batch, *args, **kwargs)
            finally:
                self._batch = None
            self._witness.phase("verify", began, time.time_ns())
            self._guard.safely(self._judge, self._witness, input_batch)
            return output

        return __call__

    def _judge(self, witness: Witness, batch: Any) -> None:
        calls, self._calls = self._calls, []
        if sum(call.requests for call in calls) == batch.num_reqs:
            budget = None if self._confidence is None else int(batch.num_draft_tokens)
            witness.judged(places(batch), Judgements(calls), budget)

    def _verify(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _verify(sampler: Any, logits: Any, draft_logits: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(sampler, logits, draft_logits, *args, **kwargs)
            if self._batch is not None:
                self._guard.safely(self._keep_verified, sampler, result, logits, draft_logits, *args)
            return result

        return _verify

    def _keep_verified(
        self,
        sampler: Any,
        result: Any,
        logits: Any,
        draft_logits: Any,
        draft_sampled: Any,
        pos: Any,
        cu_num_logits: Any,
        idx_mapping: Any,
        idx_mapping_np: Any,
        expanded_idx_mapping: Any,
        expanded_local_pos: Any,
        upper: Any,
        verify_draft_sampled: Any,
    ) -> None:
        """Arguments in the order in which vLLM gives them: known.py says where it does."""
        processed, sampled, num_sampled = result
        call = Verified(
            logits=logits,
            processed=processed,
            draft_logits=draft_logits,
            tokens=verify_draft_sampled,
            pos=pos,
            cu_num_logits=cu_num_logits,
            idx_mapping=idx_mapping,
            idx_mapping_np=idx_mapping_np,
            expanded_idx_mapping=expanded_idx_mapping,
            expanded_local_pos=expanded_local_pos,
            sampled=sampled,
            num_sampled=num_sampled,
            states=sampler.sampler.sampling_states,
            by_block=bool(sampler.use_block_verification),
            confidence=self._confidence,
        )
        assert self._witness is not None
        self._calls.append(gather(rows_of_verified(call), full=self._witness.full))

    def _sample_random(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample_random(*args: Any, **kwargs: Any) -> Any:
            self._fused = bool(kwargs.get("use_fused_sampler", args[-1] if args else False))
            return original(*args, **kwargs)

        return _sample_random

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(sampler: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(sampler, logits, *args, **kwargs)
            if self._batch is not None:
                self._guard.safely(self._keep_sampled, sampler, result, logits, *args)
            return result

        return sample

    def _keep_sampled(
        self,
        sampler: Any,
        result: Any,
        logits: Any,
        expanded_idx_mapping: Any,
        idx_mapping: Any,
        idx_mapping_np: Any,
        pos: Any,
        input_ids: Any,
        expanded_local_pos: Any,
        *rest: Any,
    ) -> None:
        """A row for each request, and no drafts. A kernel that cuts by itself leaves its logits uncut."""
        sampled, processed = result
        if self._fused:
            states = sampler.sampling_states
            processed = states.apply_top_k_top_p(processed.clone(), expanded_idx_mapping, idx_mapping_np)
        call = Verified(
            logits=logits,
            processed=processed,
            draft_logits=None,
            tokens=input_ids,
            pos=pos,
            cu_num_logits=self._batch.cu_num_logits,
            idx_mapping=idx_mapping,
            idx_mapping_np=idx_mapping_np,
            expanded_idx_mapping=expanded_idx_mapping,
            expanded_local_pos=expanded_local_pos,
            sampled=sampled.reshape(-1, 1),
            num_sampled=sampled.new_ones(len(sampled)),
            states=sampler.sampling_states,
        )
        assert self._witness is not None
        self._calls.append(gather(rows_of_verified(call), full=self._witness.full))


def places(batch: Any) -> list[BatchPlace]:
    """The requests of V2's InputBatch. Its host runs ahead: it counts every draft as accepted at first.

    Which KV blocks were written only the device knows.
    """
    drafts = batch.num_draft_tokens_per_req
    upper = batch.seq_lens_cpu_upper_bound.numpy()
    return [
        BatchPlace(
            name=name,
            row=row,
            context=int(batch.num_computed_tokens_np[row]),
            count=int(batch.num_scheduled_tokens[row]),
            drafts=0 if drafts is None else int(drafts[row]),
            ended_prompt=bool(upper[row] >= batch.prefill_len_np[row]),
            blocks=NO_INTS,
            first_block=0,
            ahead=True,
        )
        for row, name in enumerate(batch.req_ids)
    ]
