"""Hooks in vLLM's V1 model runner: they tell the witness when a step begins, what was judged, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from specscope.trace.inside.chain import NO_INTS
from specscope.trace.inside.gather import gather
from specscope.trace.inside.gathered import Judgements
from specscope.trace.inside.hooking import ErrorGuard, HookedCall, wrap
from specscope.vllm.known import RUNNER, Hooks
from specscope.vllm.processes import wrap_loaded
from specscope.vllm.v1.here import DraftVocabulary, judge_here
from specscope.vllm.v1.rows import rows_of
from specscope.vllm.v1.sampler import SamplerCall, SamplerHooks
from specscope.vllm.v1.scores import NONE, DrafterScores, Passes
from specscope.vllm.witness import BatchPlace, Witness, some_blocks

if TYPE_CHECKING:
    from specscope.vllm.v1.debugger import Debugger


class RunnerHooks:
    """One for a process. The witness is made when the runner has its model and its KV cache."""

    def __init__(
        self,
        guard: ErrorGuard,
        sampler: SamplerHooks,
        make_witness: Callable[[Any], Witness | None],
        debugger: Debugger | None = None,
        listen: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """`listen` opens the debugger's socket, when a runner has been made and before any request."""
        self._guard, self._sampler, self._make = guard, sampler, make_witness
        self._debugger, self._listen = debugger, listen
        self._witness: Witness | None = None
        self._scores: DrafterScores | None = None
        self._vocabulary = DraftVocabulary()
        self._scheduled: Any = None  # vLLM's SchedulerOutput of the step that runs
        self._asked = False  # whether a witness was to be made; only one rank has one

    @property
    def targets(self) -> Mapping[str, Hooks]:
        """What goes around which function, by module."""
        return {
            RUNNER: {
                "GPUModelRunner.execute_model": self._execute_model,
                "GPUModelRunner._sample": self._sample,
                "GPUModelRunner.sample_tokens": self._sample_tokens,
                "GPUModelRunner.propose_draft_token_ids": self._propose,
            }
        }

    def install(self, module: ModuleType) -> None:
        """Into vllm.v1.worker.gpu_model_runner: what is made before the first step."""
        if self._debugger is not None:
            wrap(module.GPUModelRunner, "__init__", self._init)
        wrap_loaded(module.GPUModelRunner, self._of)

    def _of(self, runner: Any) -> Witness | None:
        if not self._asked:
            self._asked = True
            self._witness = self._guard.safely(self._make, runner)
            if self._witness is not None:
                sampled = self._witness.run.speculation.get("draft_sample_method") == "probabilistic"
                self._scores = DrafterScores(self._guard, sampled=sampled, full=self._witness.full)
        return None if self._guard.is_off else self._witness

    def _init(self, call: HookedCall) -> None:
        call()
        self._guard.safely(self._listen, call.args[0])

    def _execute_model(self, call: HookedCall) -> Any:
        given = call.given
        witness, began = self._of(given["self"]), time.time_ns()
        if witness is not None:
            self._scheduled = given["scheduler_output"]
            self._guard.safely(witness.begin, self._scheduled)
        output = call()
        if witness is not None:
            witness.phase("forward", began, time.time_ns())
        return output

    def _sample(self, call: HookedCall) -> Any:
        witness, began = self._witness, time.time_ns()
        self._sampler.listening = witness is not None and not self._guard.is_off
        try:
            output = call()
        finally:
            self._sampler.listening = False
        if witness is not None:
            witness.phase("verify", began, time.time_ns())
            judged, self._sampler.call = self._sampler.call, None
            self._guard.safely(self._judge, witness, call.args[0], judged)
        return output

    def _judge(self, witness: Witness, runner: Any, call: SamplerCall | None) -> None:
        """The sampler has run, and the runner's batch still is as it was judged."""
        if call is None or self._scores is None or self._scheduled is None:
            return
        there = places(runner, self._scheduled, call.drafted)
        for place in there:
            place.match_length = self._scores.match_length(place.name)
        passes = {place.row: self._scores.take(place.name) for place in there if place.ended_prompt}
        read = judge_here if call.logits.device.type == "cpu" else judge_there
        witness.judged(there, read(call, passes, full=witness.full, vocabulary=self._vocabulary))
        if self._debugger is not None:
            self._debugger.judged(witness)

    def _propose(self, call: HookedCall) -> Any:
        runner, witness, scores, began = call.args[0], self._witness, self._scores, time.time_ns()
        if scores is not None:
            self._guard.safely(scores.begin, runner)
        drafts = call()
        if witness is not None and scores is not None:
            witness.phase("draft", began, time.time_ns())
            self._guard.safely(lambda: scores.end(list(runner.input_batch.req_ids)))
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
    batch, ahead = runner.input_batch, bool(getattr(runner, "use_async_scheduling", False))
    names = list(batch.req_ids)
    unfinished = runner.discard_request_mask.np[: len(names)].copy()
    size = runner.vllm_config.cache_config.block_size
    tables, behind = batch.block_table.block_tables, 3 * max(drafted, default=0) if ahead else 0
    batch_places = []
    for row, name in enumerate(names):
        if name not in scheduled.num_scheduled_tokens:
            continue
        context, count = int(batch.num_computed_tokens_cpu[row]), scheduled.num_scheduled_tokens[name]
        blocks, first = NO_INTS, 0  # where the model has several kinds of cache
        if len(tables) == 1:
            blocks, first = some_blocks(tables[0].block_table.np[row], context, count, size, behind)
        batch_places.append(
            BatchPlace(name, row, context, count, drafted[row], not unfinished[row], blocks, first, ahead)
        )
    return batch_places
