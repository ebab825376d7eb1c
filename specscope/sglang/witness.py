"""ResultWitness: makes a StepRecord of each result that the scheduler takes, with what it knows of the requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specscope.sglang.run_info import GREEDILY, end_reason, read_params
from specscope.sglang.verification import Verification
from specscope.trace.inside.recorder import Known, Recorder
from specscope.trace.inside.trees import JudgedRequest, unseen
from specscope.trace.record.records import Phase, Preceded, RequestEnd, RequestInfo, RequestStep

PROBE = "HEALTH_CHECK"  # how ids of requests begin with which GET /health looks whether tokens come out


@dataclass
class Tracked:
    """A request while it is in the engine."""

    known: Known
    req: Any  # SGLang's own
    retracted: bool = False

    def emits(self) -> int:
        """How many of its output tokens are new."""
        return len(self.req.output_ids_through_stop) - self.known.emitted


class ResultWitness:
    """What SGLang's hooks tell, put together a result at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.run, self.bytes = recorder, recorder.run, 0
        self._requests: dict[str, Tracked] = {}
        self._admitted: list[RequestInfo] = []

    def prefilled(self, batch: Any, before: Sequence[tuple[bool, bool]], began_ns: int) -> None:
        """The result of a prefill was taken: the first token of each prompt that it ended is drawn without drafts.

        `before`: of each request whether what came is dropped, and whether its prompt goes on behind this chunk.
        """
        parts = []
        for place, (req, (skipped, in_prompt)) in enumerate(zip(batch.reqs, before, strict=True)):
            if skipped or is_own(req):
                continue
            tracked = self._tracked(req)
            tracked.retracted = False
            context, fed = int(batch.prefix_lens[place]), int(batch.extend_lens[place])
            new = 0 if in_prompt else tracked.emits()
            if new <= 0:
                parts.append(tracked.known.chunk(context, fed))
                continue
            drawn = unseen(int(req.output_ids[tracked.known.emitted + new - 1]))
            parts.append(self.recorder.decoded(tracked.known, drawn, new, context=context, prefill=fed - 1))
        self._tell(parts, (Phase("commit", began_ns, time.time_ns()),))

    def decoded(
        self, batch: Any, skipped: Sequence[bool], judged: Sequence[JudgedRequest], seen: Verification, began_ns: int
    ) -> None:
        """The result of a verification was taken."""
        self.bytes += seen.bytes
        parts = []
        for req, skip, made in zip(batch.reqs, skipped, judged, strict=True):
            if skip or is_own(req):
                continue
            tracked, invalid = self._tracked(req), made.judged.invalid
            sizing = f"{invalid} slots without a draft" if invalid else ""
            about: dict[str, Any] = {"context": made.context, "sizing": sizing}
            parts.append(self.recorder.decoded(tracked.known, made.judged, tracked.emits(), **about))
        self._tell(parts, (*_phases(seen, began_ns), Phase("commit", began_ns, time.time_ns())))

    def _tracked(self, req: Any) -> Tracked:
        if req.rid not in self._requests:
            self._requests[req.rid] = tracked = Tracked(Known(self._info(req)), req)
            self._admitted.append(tracked.known.info)
        return self._requests[req.rid]

    def _info(self, req: Any) -> RequestInfo:
        params, labels = read_params(req.sampling_params, greedily=bool(self.run.speculation.get(GREEDILY)))
        if getattr(req, "custom_logit_processor", None):
            labels["logits_processors"] = "custom_logit_processor"
        return self.recorder.info(
            req.rid,
            list(req.origin_input_ids),
            (params, labels),
            arrival_ns=_wall_ns(req, "wait_queue_entry_time"),
            admitted_ns=_wall_ns(req, "forward_entry_time"),
        )

    def _tell(self, parts: list[RequestStep], phases: tuple[Phase, ...]) -> None:
        """Publish a step, with the requests that have ended or lost their KV since the last one."""
        ends = tuple(self._end(tracked) for tracked in list(self._requests.values()) if tracked.req.finished())
        lost = [tracked for tracked in self._requests.values() if tracked.req.is_retracted and not tracked.retracted]
        for tracked in lost:
            tracked.retracted, tracked.known.preceded = True, Preceded.PREEMPTION
        admitted, self._admitted = self._admitted, []
        if parts or ends or lost or admitted:
            preempted = tuple(tracked.known.info.id for tracked in lost)
            there: dict[str, Any] = {"admitted": admitted, "preempted": preempted, "finished": ends}
            self.recorder.publish(self.recorder.record(phases, parts, running=len(parts), **there))

    def _end(self, tracked: Tracked) -> RequestEnd:
        req, info = tracked.req, tracked.known.info
        del self._requests[info.id]
        reason, stop, wrong = end_reason(req, self.run.eos_tokens)
        return RequestEnd(info, time.time_ns(), reason, stop, np.array(req.output_ids_through_stop, np.int32), wrong)


def is_own(req: Any) -> bool:
    """Whether SGLang sent it to itself: a probe of its health, or no tokens, to fill the cache for several outputs."""
    return str(req.rid).startswith(PROBE) or req.sampling_params.max_new_tokens == 0


def _phases(seen: Verification, began_ns: int) -> tuple[Phase, ...]:
    """As the host launched them. Where SGLang overlaps steps, they lie before the one in which the result is taken."""
    (drafting, drafted), (sampling, sampled) = seen.drafted_ns, seen.verified_ns
    verify = Phase("verify", sampling, min(sampled, began_ns))
    return (Phase("draft", drafting, drafted), Phase("forward", drafted, sampling), verify) if drafted else (verify,)


def _wall_ns(req: Any, name: str) -> int:
    """One of its time stamps, which SGLang takes with time.perf_counter, on the wall clock; now where it has none."""
    stamp = getattr(getattr(req, "time_stats", None), name, 0.0)
    return time.time_ns() - (int((time.perf_counter() - stamp) * 1e9) if stamp else 0)
