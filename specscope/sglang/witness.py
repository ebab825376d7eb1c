"""ResultWitness: makes a StepRecord of each result that the scheduler takes, with what it knows of the requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specscope.sglang.run_info import GREEDILY, end_reason, read_params
from specscope.sglang.trees import JudgedRequest, unseen
from specscope.sglang.verification import Verification
from specscope.trace.history.wording import title_of
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.records import (
    Phase,
    Preceded,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    followed_by,
)
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary

PROBE = "HEALTH_CHECK"  # how ids of requests begin with which GET /health looks whether tokens come out
ONE_PASS = ("dflash", "dspark")  # methods that draft all depths in one pass


@dataclass
class Tracked:
    """A request while it is in the engine."""

    info: RequestInfo
    req: Any  # SGLang's own
    index: int = 0  # its next step
    emitted: int = 0  # output tokens so far
    preceded: Preceded = Preceded.PREFILL
    retracted: bool = False

    def emits(self) -> int:
        """How many of its output tokens are new."""
        count = len(self.req.output_ids_through_stop)
        new, self.emitted = count - self.emitted, count
        return new


@dataclass(frozen=True)
class Prefilled:
    """How things stood with a request before the result of a prefill was taken."""

    skipped: bool  # it had ended, or lost its KV: what came is dropped
    in_prompt: bool  # its prompt does not end in this chunk


class ResultWitness:
    """`publish` takes each finished record, and must not wait."""

    def __init__(self, run: RunInfo, vocabulary: Vocabulary, publish: Callable[[StepRecord], None]) -> None:
        self.run, self.steps, self.bytes = run, 0, 0
        self._vocabulary, self._publish = vocabulary, publish
        self._requests: dict[str, Tracked] = {}
        self._admitted: list[RequestInfo] = []

    def prefilled(self, batch: Any, before: Sequence[Prefilled], began_ns: int) -> None:
        """The result of a prefill was taken: the first token of each prompt that it ended is drawn without drafts."""
        parts = []
        for place, (req, was) in enumerate(zip(batch.reqs, before, strict=True)):
            if was.skipped or is_own(req):
                continue
            known = self._known(req)
            known.retracted = False
            context, fed = int(batch.prefix_lens[place]), int(batch.extend_lens[place])
            new = 0 if was.in_prompt else known.emits()
            index, known.index = known.index, known.index + 1
            if new <= 0:
                parts.append(RequestStep(req.rid, index, context, fed, "none", DraftTree.empty(), None, 0))
                continue
            verdict = unseen(int(req.output_ids[known.emitted - 1]))
            preceded, known.preceded = known.preceded, followed_by(verdict.kind, 0, 0)
            empty = DraftTree.empty()
            parts.append(RequestStep(req.rid, index, context, fed - 1, "none", empty, verdict, new, preceded=preceded))
        self._tell(parts, (Phase("commit", began_ns, time.time_ns()),))

    def decoded(
        self, batch: Any, skipped: Sequence[bool], judged: Sequence[JudgedRequest], seen: Verification, began_ns: int
    ) -> None:
        """The result of a verification was taken."""
        self.bytes += seen.bytes
        there = zip(batch.reqs, skipped, judged, strict=True)
        parts = [self._part(req, each) for req, skip, each in there if not (skip or is_own(req))]
        self._tell(parts, (*_phases(seen, began_ns), Phase("commit", began_ns, time.time_ns())))

    def _part(self, req: Any, made: JudgedRequest) -> RequestStep:
        known, judged = self._known(req), made.judged
        index, known.index = known.index, known.index + 1
        verdict, preceded = judged.verdict, known.preceded
        known.preceded = followed_by(verdict.kind, len(verdict.outcome), verdict.accepted)
        one_pass = bool(len(judged.tree)) and self.run.speculation.get("method") in ONE_PASS
        return RequestStep(
            request=req.rid,
            index=index,
            context_len=made.context,
            prefill_tokens=0,
            drafter=self.run.drafter if len(judged.tree) else "none",
            tree=judged.tree,
            verdict=verdict,
            emitted=known.emits(),
            notes=judged.notes,
            sizing=f"{judged.invalid} slots without a draft" if judged.invalid else "",
            preceded=preceded,
            parents=judged.parents,
            method=MethodNotes(one_pass=True) if one_pass else None,
        )

    def _known(self, req: Any) -> Tracked:
        if req.rid not in self._requests:
            self._requests[req.rid] = known = Tracked(self._info(req), req)
            self._admitted.append(known.info)
        return self._requests[req.rid]

    def _info(self, req: Any) -> RequestInfo:
        prompt = list(req.origin_input_ids)
        params, labels = read_params(req.sampling_params, greedily=bool(self.run.speculation.get(GREEDILY)))
        if getattr(req, "custom_logit_processor", None):
            labels["logits_processors"] = "custom_logit_processor"
        text = self._vocabulary.text(prompt)
        return RequestInfo(
            id=req.rid,
            arrival_ns=_wall_ns(req, "wait_queue_entry_time"),
            admitted_ns=_wall_ns(req, "forward_entry_time"),
            prompt=text,
            prompt_tokens=np.array(prompt, np.int32),
            params=params,
            labels=labels,
            title=title_of(text),
        )

    def _tell(self, parts: list[RequestStep], phases: tuple[Phase, ...]) -> None:
        """Publish a step, with the requests that have ended or lost their KV since the last one."""
        ends = tuple(self._end(known) for known in list(self._requests.values()) if known.req.finished())
        lost = [known for known in self._requests.values() if known.req.is_retracted and not known.retracted]
        for known in lost:
            known.retracted, known.preceded = True, Preceded.PREEMPTION
        admitted, self._admitted = tuple(self._admitted), []
        if not (parts or ends or lost or admitted):
            return
        record = StepRecord(
            step=self.steps,
            phases=phases,
            running=len(parts),
            waiting=0,
            blocks_used=0,
            blocks_free=0,
            speculation=True,
            speculation_off="",
            admitted=admitted,
            requests=tuple(parts),
            preempted=tuple(known.info.id for known in lost),
            finished=ends,
        )
        self.steps += 1
        self._publish(record)

    def _end(self, known: Tracked) -> RequestEnd:
        req = known.req
        del self._requests[known.info.id]
        reason, stop, wrong = end_reason(req, self.run.eos_tokens)
        output = np.array(req.output_ids_through_stop, np.int32)
        return RequestEnd(known.info, time.time_ns(), reason, stop, output, wrong)


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
