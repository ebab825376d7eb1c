"""Hooks in vLLM's V2 model runner and its samplers. What is gathered on a GPU is read a step later."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from typing import Any

from specscope.trace.inside.gather import gather
from specscope.trace.inside.gathered import Gathered, Judgements
from specscope.trace.inside.hooking import ErrorGuard, HookedCall
from specscope.vllm.known import V2_DRAFTER, V2_PLAIN, V2_REJECTION, V2_RUNNER, Hooks
from specscope.vllm.v2.rows import DraftLogits, Verified, rows_of_verified
from specscope.vllm.witness import BatchPlace, Witness

# What both samplers' functions are given, and the rows are made of
PASSED_ON = ("logits", "pos", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos")


class V2Hooks:
    """One for a process."""

    def __init__(self, guard: ErrorGuard, make_witness: Callable[[Any], Witness | None], scores: DraftLogits) -> None:
        self._guard, self._scores = guard, scores
        self.made = cache(partial(guard.safely, make_witness))
        self._witness: Witness | None = None  # from execute_model of a real step to the end of its sample_tokens
        self._batch: Any = None  # vLLM's InputBatch while a sampler runs in a real step
        self._calls: list[Gathered] = []
        self._confidence: Any = None  # with an adaptive budget: what the drafter thinks of its drafts, by slot
        self._fused = False  # whether the plain sampler cut by top-k and top-p inside its kernel

    @property
    def targets(self) -> Mapping[str, Hooks]:
        """What goes around which function, by module. A step without drafts goes through the plain sampler alone."""
        return {
            V2_PLAIN: {
                "Sampler.__call__": self._sampler,
                "Sampler.sample": partial(self._then, self._keep_sampled),
                "Sampler._sample_random": self._sample_random,
            },
            V2_REJECTION: {
                "RejectionSampler.__call__": self._sampler,
                "RejectionSampler._verify": partial(self._then, self._keep_verified),
            },
            V2_DRAFTER: {"DraftModelSpeculator.sample_draft": self._scores.sample_draft},
            V2_RUNNER: {
                "GPUModelRunner.execute_model": self._execute_model,
                "GPUModelRunner.sample_tokens": self._sample_tokens,
            },
        }

    @cached_property
    def _step_seeds(self) -> bool:
        """Whether block verification has a seed for each draft, as since 0.33."""
        rule = getattr(sys.modules.get(V2_REJECTION), "rejection_sample", None)
        return hasattr(sys.modules.get(getattr(rule, "__module__", "")), "spec_step_seed")

    def _execute_model(self, call: HookedCall) -> Any:
        given, began = call.given, time.time_ns()
        scheduled, self._witness = given["scheduler_output"], None
        witness = None if self._guard.is_off or given.get("dummy_run", False) else self.made(given["self"])
        if witness is None:
            return call()
        self._guard.safely(witness.begin, scheduled)
        output = call()
        witness.phase("forward", began, time.time_ns())
        self._witness = witness if scheduled.total_num_scheduled_tokens else None
        return output

    def _sample_tokens(self, call: HookedCall) -> Any:
        adaptive = getattr(call.args[0], "adaptive_verification", None)
        self._confidence = getattr(adaptive, "_confidence_probs", None)
        try:
            output = call()
        finally:
            witness, self._witness = self._witness, None
        if witness is not None:
            witness.phase("draft", 0, time.time_ns())
        return output

    def _sampler(self, call: HookedCall) -> Any:
        """Of either sampler: what it calls meanwhile gathers."""
        witness, began = self._witness, time.time_ns()
        if witness is None or self._guard.is_off:
            return call()
        batch = self._batch = call.given["input_batch"]
        self._calls = []
        try:
            output = call()
        finally:
            self._batch = None
        witness.phase("verify", began, time.time_ns())
        self._guard.safely(self._judge, witness, batch)
        return output

    def _judge(self, witness: Witness, batch: Any) -> None:
        calls, self._calls = self._calls, []
        if (judged := sum(call.requests for call in calls)) != batch.num_reqs:
            raise RuntimeError(f"{judged} of the {batch.num_reqs} requests of a step were seen: the step is left out")
        budget = None if self._confidence is None else int(batch.num_draft_tokens)
        witness.judged(places(batch), Judgements(calls), budget)

    def _then(self, keep: Callable[[Any, Mapping[str, Any]], None], call: HookedCall) -> Any:
        """Keep what a sampler's function gave, while a sampler runs in a real step."""
        result = call()
        if self._batch is not None:
            self._guard.safely(keep, result, call.given)
        return result

    def _keep_verified(self, result: Any, given: Mapping[str, Any]) -> None:
        """`given`: the arguments of `_verify`, by name."""
        sampler, (processed, sampled, num_sampled) = given["self"], result
        self._keep(
            given,
            processed=processed,
            draft_logits=given["draft_logits"],
            scores=self._scores.tensor,
            tokens=given["verify_draft_sampled"],
            cu_num_logits=given["cu_num_logits"],
            sampled=sampled,
            num_sampled=num_sampled,
            states=sampler.sampler.sampling_states,
            by_block=bool(sampler.use_block_verification),
            step_seeds=self._step_seeds,
            confidence=self._confidence,
        )

    def _keep(self, given: Mapping[str, Any], **more: Any) -> None:
        assert self._witness is not None
        call = Verified(**{name: given[name] for name in PASSED_ON}, **more)
        self._calls.append(gather(rows_of_verified(call), full=self._witness.full))

    def _sample_random(self, call: HookedCall) -> Any:
        self._fused = bool(call.given.get("use_fused_sampler"))
        return call()

    def _keep_sampled(self, result: Any, given: Mapping[str, Any]) -> None:
        """A row for each request, and no drafts. A kernel that cuts by itself leaves its logits uncut."""
        (sampled, processed), states = result, given["self"].sampling_states
        if self._fused:
            slots = given["expanded_idx_mapping"], given["idx_mapping_np"]
            processed = states.apply_top_k_top_p(processed.clone(), *slots)
        self._keep(
            given,
            processed=processed,
            draft_logits=None,
            tokens=given["input_ids"],
            cu_num_logits=self._batch.cu_num_logits,
            sampled=sampled.reshape(-1, 1),
            num_sampled=sampled.new_ones(len(sampled)),
            states=states,
        )


def places(batch: Any) -> list[BatchPlace]:
    """The requests of V2's InputBatch. Its host runs ahead: it counts every draft as accepted at first."""
    rows, drafts = range(batch.num_reqs), batch.num_draft_tokens_per_req
    contexts, counts = batch.num_computed_tokens_np.tolist(), batch.num_scheduled_tokens.tolist()
    ended = batch.seq_lens_cpu_upper_bound.numpy()[: len(rows)] >= batch.prefill_len_np[: len(rows)]
    return [
        BatchPlace(
            batch.req_ids[row],
            row,
            contexts[row],
            counts[row],
            0 if drafts is None else int(drafts[row]),
            bool(ended[row]),
            ahead=True,
        )
        for row in rows
    ]
