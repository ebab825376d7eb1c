"""Hooks in vLLM's V1 model runner and sampler: they tell the witness when a step begins, what was judged, and when it
ends. Of the sampler's tensors they keep references while one call of it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from specscope.trace.inside.gather import gather
from specscope.trace.inside.gathered import Judgements
from specscope.trace.inside.hooking import ErrorGuard, HookedCall
from specscope.trace.inside.host import DraftVocabulary
from specscope.vllm.known import PLAIN, REJECTION, RUNNER, Hooks
from specscope.vllm.v1.here import judge_here
from specscope.vllm.v1.rows import NONE, DrafterScores, Passes, SamplerCall, rows_of
from specscope.vllm.witness import BatchPlace, Witness

if TYPE_CHECKING:
    from specscope.vllm.v1.debugger import Debugger


class RunnerHooks:
    """One for a process. The witness is made when the runner has its model and its KV cache; only one rank has one."""

    def __init__(
        self,
        guard: ErrorGuard,
        make_witness: Callable[[Any], Witness | None],
        debugger: Debugger | None = None,
    ) -> None:
        self._guard, self._debugger = guard, debugger
        self.made = cache(partial(guard.safely, make_witness))
        self._witness: Witness | None = None  # of the step that runs
        self._scores = DrafterScores()
        self._vocabulary = DraftVocabulary()
        self._scheduled: Any = None  # vLLM's SchedulerOutput of the step that runs
        self._listening = False  # around the sampler of a real step: vLLM also calls it to warm up
        self._call: SamplerCall | None = None  # the rejection sampler's that runs now, or ran while it listened

    @property
    def targets(self) -> Mapping[str, Hooks]:
        """What goes around which function, by module. The plain sampler draws the bonus token."""
        return {
            PLAIN: {"Sampler.sample": self._plain},
            REJECTION: {
                "RejectionSampler.forward": self._forward,
                "rejection_sample": partial(self._noted, "target_logits"),  # after every rule
                "generate_uniform_probs": self._uniform_probs,
                "sample_recovered_tokens": partial(self._noted, "target_probs"),  # and normalised
            },
            RUNNER: {
                "GPUModelRunner.execute_model": self._execute_model,
                "GPUModelRunner._sample": self._sample,
                "GPUModelRunner.sample_tokens": self._sample_tokens,
                "GPUModelRunner.propose_draft_token_ids": self._propose,
            },
        }

    def _execute_model(self, call: HookedCall) -> Any:
        given, began = call.given, time.time_ns()
        witness = self._witness = None if self._guard.is_off else self.made(given["self"])
        if witness is None:
            return call()
        self._scheduled = given["scheduler_output"]
        self._guard.safely(witness.begin, self._scheduled)
        output = call()
        witness.phase("forward", began, time.time_ns())
        return output

    def _sample(self, call: HookedCall) -> Any:
        witness, began = self._witness, time.time_ns()
        if witness is None:
            return call()
        self._listening = not self._guard.is_off
        try:
            output = call()
        finally:
            self._listening = False
        witness.phase("verify", began, time.time_ns())
        judged, self._call = self._call, None
        if judged is not None:
            self._guard.safely(self._judge, witness, call.args[0], judged)
        return output

    def _judge(self, witness: Witness, runner: Any, call: SamplerCall) -> None:
        """The sampler has run, and the runner's batch still is as it was judged."""
        there = places(runner, self._scheduled, call.drafted)
        passes = {place.row: self._scores.take(place.name) for place in there if place.ended_prompt}
        read = judge_here if call.logits.device.type == "cpu" else judge_there
        witness.judged(there, read(call, passes, full=witness.full, vocabulary=self._vocabulary))
        if self._debugger is not None:
            self._debugger.judged(witness)

    def _forward(self, call: HookedCall) -> Any:
        self._call = self._guard.safely(_begun, call.given) if self._listening else None
        output = call()
        if self._call is not None:
            self._call.output = output.sampled_token_ids
        return output

    def _noted(self, name: str, call: HookedCall) -> Any:
        """Of the sampler's call an argument of this one."""
        if self._call is not None:
            setattr(self._call, name, call.given.get(name))
        return call()

    def _uniform_probs(self, call: HookedCall) -> Any:
        coins = call()
        if self._call is not None:
            self._call.coins = coins.clamp(min=2.0**-60)  # a copy: some rules overwrite them. 0 stands for no coin
        return coins

    def _plain(self, call: HookedCall) -> Any:
        """Sampling overwrites the logits that it is given: temperature is applied in place."""
        given, ours = call.given, self._call
        if ours is not None and ours.bonus_logits is None and not given["sampling_metadata"].all_greedy:
            ours.bonus_logits = given["logits"].clone()
        return call()

    def _propose(self, call: HookedCall) -> Any:
        runner, witness, began = call.args[0], self._witness, time.time_ns()
        if witness is None:
            return call()
        self._guard.safely(self._scores.begin, runner, witness)
        drafts = call()
        witness.phase("draft", began, time.time_ns())
        self._guard.safely(lambda: self._scores.end(list(runner.input_batch.req_ids)))
        return drafts

    def _sample_tokens(self, call: HookedCall) -> Any:
        output = call()
        if self._witness is not None:
            self._witness.phase("commit", 0, time.time_ns())
        return output


def judge_there(
    call: SamplerCall, passes: Mapping[int, Passes], *, full: bool, vocabulary: DraftVocabulary | None = None
) -> Judgements:
    """The judgements of tensors on a device, to be read when they have come."""
    drafter = [passes.get(row, NONE) for row in range(len(call.drafted))]
    return Judgements([gather(rows_of(call, drafter), full=full)])


def places(runner: Any, scheduled: Any, drafted: list[int]) -> list[BatchPlace]:
    """The requests of V1's batch. With asynchronous scheduling the host counts every draft as accepted at first."""
    batch, counts, in_prompt = runner.input_batch, scheduled.num_scheduled_tokens, runner.discard_request_mask.np
    there = [(row, name, int(batch.num_computed_tokens_cpu[row])) for row, name in enumerate(batch.req_ids)]
    ahead = bool(runner.use_async_scheduling)
    return [
        BatchPlace(name, row, context, counts[name], drafted[row], not in_prompt[row], ahead)
        for row, name, context in there
        if name in counts
    ]


def _begun(given: Mapping[str, Any]) -> SamplerCall:
    """What vLLM writes anew for each batch, or while it judges (0.33's lossy rules: the drafts), is copied."""
    metadata, sampling = given["metadata"], given["sampling_metadata"]
    rules = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    return SamplerCall(
        logits=given["logits"],
        drafted=list(metadata.num_draft_tokens),
        draft_tokens=metadata.draft_token_ids.clone(),
        draft_probs=given["draft_probs"],
        target_rows=metadata.target_logits_indices,
        cut=getattr(sys.modules.get(REJECTION), "apply_top_k_top_p", None),
        **{name: None if values is None else values.clone() for name, values in rules.items()},
    )
