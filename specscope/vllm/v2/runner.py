"""Hooks in vLLM's V2 model runner and its samplers. What is gathered on a GPU is read a step later."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import numpy as np

from specscope.trace.inside.chain import NO_INTS
from specscope.trace.inside.gather import gather
from specscope.trace.inside.gathered import Gathered, Judgements
from specscope.trace.inside.hooking import ErrorGuard, HookedCall
from specscope.trace.record.tree import Ints
from specscope.vllm.known import V2_DRAFTER, V2_PLAIN, V2_REJECTION, V2_RUNNER, Hooks
from specscope.vllm.processes import wrap_loaded
from specscope.vllm.v2.rows import Verified, rows_of_verified
from specscope.vllm.v2.scores import DraftLogits
from specscope.vllm.witness import BatchPlace, Witness

STEPS_AHEAD = 3  # that the host may be before the device, at most
# What both samplers' functions are given, and the rows are made of
PASSED_ON = ("logits", "pos", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos")


class V2Hooks:
    """One for a process."""

    def __init__(self, guard: ErrorGuard, make_witness: Callable[[Any], Witness | None], scores: DraftLogits) -> None:
        self._guard, self._make, self._scores = guard, make_witness, scores
        self._witness: Witness | None = None
        self._asked = False
        self._batch: Any = None  # vLLM's InputBatch while a sampler runs in a real step
        self._listens = False  # between execute_model of a real step and the end of its sample_tokens
        self._calls: list[Gathered] = []
        self._confidence: Any = None  # with an adaptive budget: what the drafter thinks of its drafts, by slot
        self._blocks = BlockLists()
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

    def install(self, module: ModuleType) -> None:
        """Into vllm.v1.worker.gpu.model_runner: what is made before the first step."""
        wrap_loaded(module.GPUModelRunner, self._of)

    @cached_property
    def _step_seeds(self) -> bool:
        """Whether block verification has a seed for each draft, as since 0.33."""
        rule = getattr(sys.modules.get(V2_REJECTION), "rejection_sample", None)
        kernels = sys.modules.get(getattr(rule, "__module__", ""))
        return kernels is None or hasattr(kernels, "spec_step_seed")

    def _of(self, runner: Any) -> Witness | None:
        if not self._asked:
            self._asked = True
            self._witness = self._guard.safely(self._make, runner)
        return None if self._guard.is_off else self._witness

    def _execute_model(self, call: HookedCall) -> Any:
        given = call.given
        scheduled, is_real = given["scheduler_output"], not given.get("dummy_run", False)
        witness, began = self._of(given["self"]) if is_real else None, time.time_ns()
        if witness is not None:
            self._guard.safely(witness.begin, scheduled)
            self._guard.safely(self._blocks.update, scheduled)
        output = call()
        if witness is not None:
            witness.phase("forward", began, time.time_ns())
        self._listens = witness is not None and scheduled.total_num_scheduled_tokens > 0
        return output

    def _sample_tokens(self, call: HookedCall) -> Any:
        if self._listens:
            adaptive = getattr(call.args[0], "adaptive_verification", None)
            self._confidence = getattr(adaptive, "_confidence_probs", None)
        try:
            output = call()
        finally:
            listened, self._listens = self._listens, False
        if listened and self._witness is not None:
            self._witness.phase("draft", 0, time.time_ns())
        return output

    def _sampler(self, call: HookedCall) -> Any:
        """Of either sampler: what it calls meanwhile gathers."""
        if not self._listens or self._witness is None or self._guard.is_off:
            return call()
        batch = self._batch = call.given["input_batch"]
        self._calls, began = [], time.time_ns()
        try:
            output = call()
        finally:
            self._batch = None
        self._witness.phase("verify", began, time.time_ns())
        self._guard.safely(self._judge, self._witness, batch)
        return output

    def _judge(self, witness: Witness, batch: Any) -> None:
        calls, self._calls = self._calls, []
        if (judged := sum(call.requests for call in calls)) != batch.num_reqs:
            raise RuntimeError(f"{judged} of the {batch.num_reqs} requests of a step were seen: the step is left out")
        budget = None if self._confidence is None else int(batch.num_draft_tokens)
        longest = int(witness.run.speculation.get("num_speculative_tokens") or 0)
        there = places(batch, self._blocks, witness.run.block_size, longest)
        witness.judged(there, Judgements(calls), budget)

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


class BlockLists:
    """The KV blocks of each request, as the scheduler gives them out: V2 keeps its block tables on the device."""

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}

    def update(self, scheduled: Any) -> None:
        """`scheduled`: vLLM's SchedulerOutput. One that was preempted comes back as a new one, with other blocks."""
        for name in scheduled.finished_req_ids:
            self._of.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self._of.pop(new.req_id, None)
            if len(new.block_ids) == 1:
                self._of[new.req_id] = list(new.block_ids[0])
        known = scheduled.scheduled_cached_reqs
        for name, more in zip(known.req_ids, known.new_block_ids, strict=True):
            if more is not None and name in self._of:
                self._of[name] += more[0]

    def of(self, name: str, low: int, high: int) -> Ints:
        """A request's blocks from number `low` to `high`; none where the model has several kinds of cache."""
        return np.array(self._of.get(name, ())[low:high], NO_INTS.dtype)


def places(batch: Any, blocks: BlockLists, size: int, longest: int) -> list[BatchPlace]:
    """The requests of V2's InputBatch. Its host runs ahead: it counts every draft as accepted at first.

    `size`: of a block; `longest`: drafts of a chain at most.
    """
    drafts = [0] * batch.num_reqs if batch.num_draft_tokens_per_req is None else batch.num_draft_tokens_per_req.tolist()
    upper = batch.seq_lens_cpu_upper_bound.numpy()
    found = []
    for row, name in enumerate(batch.req_ids):
        context, count = int(batch.num_computed_tokens_np[row]), int(batch.num_scheduled_tokens[row])
        first = max(context - STEPS_AHEAD * longest, 0) // size
        written = blocks.of(name, first, (context + count - 1) // size + 1)
        ended = bool(upper[row] >= batch.prefill_len_np[row])
        found.append(BatchPlace(name, row, context, count, drafts[row], ended, written, first, ahead=True))
    return found
