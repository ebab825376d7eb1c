"""Spans to records: the reading half of the codec. Exact where every span of a step is there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specscope.errors import UserError
from specscope.trace.params import SamplingParams
from specscope.trace.records import (
    DraftNotes,
    FinalKind,
    FinishReason,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    Verdict,
)
from specscope.trace.spans import NOTES_ARRAYS, PASS, TREE_ARRAYS, VERDICT_ARRAYS
from specscope.trace.tree import DraftTree
from specscope.trace.vocabulary import Vocabulary, unescape

Attributes = Mapping[str, Any]

STEPS_BEHIND = 64  # a step that is still incomplete when this many later ones are known has lost a span


def run_info(resource: Attributes) -> RunInfo:
    """What `spans.resource_attributes` wrote. Raises UserError for the resource of another program."""
    if "specscope.run.id" not in resource:
        service = resource.get("service.name", "an unnamed service")
        raise UserError(f"these are spans of another program ({service}), not of specscope")
    at = "specscope.run."
    try:
        return RunInfo(
            run_id=resource[at + "id"],
            target=resource[at + "target"],
            revision=resource[at + "revision"],
            drafter=resource[at + "drafter"],
            draft_model=resource[at + "draft_model"],
            tree=resource[at + "tree"],
            device=resource[at + "device"],
            dtype=resource[at + "dtype"],
            backend=resource[at + "backend"],
            seed=resource[at + "seed"],
            eos_tokens=tuple(resource.get(at + "eos_tokens", ())),
            max_context=resource[at + "max_context"],
            blocks=resource[at + "blocks"],
            block_size=resource[at + "block_size"],
            params=json.loads(resource[at + "params"]),
            versions=json.loads(resource[at + "versions"]),
            text=resource[at + "text"],
        )
    except KeyError as error:
        raise UserError(f"the capture's resource lacks {error.args[0]}: it is from another version") from None


@dataclass
class _Pending:
    """What has arrived of one engine step."""

    engine: tuple[int, int, Attributes] | None = None  # start, end, attributes of its engine_step span
    parts: dict[str, RequestStep] = field(default_factory=dict)
    admitted: dict[str, RequestInfo] = field(default_factory=dict)
    finished: dict[str, tuple[int, int, Attributes]] = field(default_factory=dict)  # root spans, decoded at the end

    def complete(self) -> bool:
        """Whether every span that the engine step names is there."""
        if self.engine is None:
            return False
        names = self.engine[2]
        return (
            len(self.parts) >= len(names.get("specscope.requests", ()))
            and len(self.admitted) >= len(names.get("specscope.admitted", ()))
            and len(self.finished) >= len(names.get("specscope.finished", ()))
        )


class Decoder:
    """Takes one run's spans in any order and gives its records in order.

    The vocabulary fills with the tokens that the spans tell the text of. A step that stays incomplete is skipped
    and counted in `lost`; `summaries` counts decode steps that came without their evidence (level `steps`).
    """

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()
        self.lost = 0
        self.summaries = 0
        self._pending: dict[int, _Pending] = {}
        self._infos: dict[str, RequestInfo] = {}
        self._next = 0

    def feed(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> list[StepRecord]:
        """One span; the records that it completes."""
        step = attributes.get("specscope.step")
        if step is None or step < self._next or name in _PHASES or attributes.get("specscope.prefill.reaches_root"):
            return []  # not ours, too late, or told by another span as well
        pending = self._pending.setdefault(step, _Pending())
        request = attributes.get("specscope.request.id", "")
        if name == "decode_step":
            part = self._decode_step(attributes)
            if part is not None:
                pending.parts[request] = part
        elif name == "prefill":
            pending.parts[request] = _step(attributes, "none", DraftTree.empty(), None, 0)
        elif name == "queue":
            pending.admitted[request] = self._infos[request] = _info(start_ns, end_ns, attributes)
        elif name == "engine_step":
            pending.engine = (start_ns, end_ns, attributes)
        else:
            pending.finished[request] = (start_ns, end_ns, attributes)
        return self._ready() if pending.complete() or len(self._pending) > STEPS_BEHIND else []

    def _ready(self) -> list[StepRecord]:
        """Complete records from the front; an incomplete one blocks until too many wait behind it."""
        records: list[StepRecord] = []
        while self._pending:
            first = min(self._pending)
            waits = first > self._next or not self._pending[first].complete()
            if waits and len(self._pending) <= STEPS_BEHIND:
                break
            self._take(first, records)
        return records

    def _take(self, step: int, records: list[StepRecord]) -> None:
        pending = self._pending.pop(step)
        self.lost += max(step - self._next, 0)
        self._next = max(self._next, step + 1)
        if pending.complete():
            records.append(self._record(step, pending))
        else:
            self.lost += 1

    def flush(self) -> list[StepRecord]:
        """Whatever is complete, past all gaps: call it when no more spans will come."""
        records: list[StepRecord] = []
        for step in sorted(self._pending):
            self._take(step, records)
        return records

    def _record(self, step: int, pending: _Pending) -> StepRecord:
        assert pending.engine is not None
        _, _, a = pending.engine
        return StepRecord(
            step=step,
            phases=_phases(a["specscope.phase.names"], a["specscope.phase.times"]),
            passes=_phases(a.get("specscope.pass.names", ()), a.get("specscope.pass.times", ())),
            device_ns=tuple(a.get("specscope.phase.device_ns", ())),
            running=a["specscope.running"],
            waiting=a["specscope.waiting"],
            blocks_used=a["specscope.blocks_used"],
            blocks_free=a["specscope.blocks_free"],
            speculation=a["specscope.speculation"],
            speculation_off=a["specscope.speculation_off"],
            admitted=tuple(pending.admitted[name] for name in a.get("specscope.admitted", ())),
            requests=tuple(pending.parts[name] for name in a.get("specscope.requests", ())),
            preempted=tuple(a.get("specscope.preempted", ())),
            finished=tuple(self._end(name, *pending.finished[name]) for name in a.get("specscope.finished", ())),
        )

    def _decode_step(self, a: Attributes) -> RequestStep | None:
        if "specscope.final.token" not in a:
            self.summaries += 1
            return None
        self._learn(a)
        tree = DraftTree(**{k: np.asarray(a.get(f"specscope.tree.{k}", ()), t) for k, t in TREE_ARRAYS.items()})
        arrays: dict[str, Any] = {
            k: np.asarray(a.get(f"specscope.verdict.{k}", ()), t) for k, t in VERDICT_ARRAYS.items()
        }
        verdict = Verdict(
            **arrays,
            token=a["specscope.final.token"],
            kind=FinalKind(a["specscope.final.kind"]),
            final_p=a["specscope.final.p"],
            final_coin=a["specscope.final.coin"],
            final_margin=a.get("specscope.final.margin", 1.0),
            forced=np.asarray(a.get("specscope.forced", ()), np.int32),
        )
        return _step(a, a["specscope.drafter"], tree, verdict, a["specscope.emitted"])

    def _learn(self, a: Attributes) -> None:
        texts: Sequence[str] = a.get("specscope.tree.text", ())
        pieces = self.vocabulary.pieces
        for token, text in zip((*a.get("specscope.tree.token", ()), a["specscope.final.token"]), texts, strict=False):
            if token not in pieces:
                pieces[token] = unescape(text)
        self.vocabulary.special.update(a.get("specscope.tree.special", ()))

    def _end(self, name: str, start_ns: int, end_ns: int, a: Attributes) -> RequestEnd:
        info = self._infos.pop(name, None) or _info_of_root(name, start_ns, a)
        return RequestEnd(
            info=info,
            finished_ns=end_ns,
            reason=FinishReason(a["gen_ai.response.finish_reasons"][0]),
            stop=unescape(a["specscope.finish.stop"]).decode("utf-8", "surrogatepass"),
            output=np.asarray(a.get("specscope.output.tokens", ()), np.int32),
            error=a["specscope.finish.error"],
        )


_PHASES = frozenset(("schedule", "draft", "forward", "verify", "commit", PASS))


def _phases(names: Sequence[str], times: Sequence[int]) -> tuple[Phase, ...]:
    return tuple(Phase(*phase) for phase in zip(names, times[::2], times[1::2], strict=True))


def _notes(a: Attributes) -> DraftNotes | None:
    if "specscope.draft.dropped" not in a:
        return None
    arrays: dict[str, Any] = {k: np.asarray(a.get(f"specscope.draft.{k}", ()), t) for k, t in NOTES_ARRAYS.items()}
    return DraftNotes(**arrays)


def _step(a: Attributes, drafter: str, tree: DraftTree, verdict: Verdict | None, emitted: int) -> RequestStep:
    return RequestStep(
        request=a["specscope.request.id"],
        index=a["specscope.request.step"],
        context_len=a["specscope.context_len"],
        prefill_tokens=a["specscope.prefill_tokens"],
        drafter=drafter,
        tree=tree,
        verdict=verdict,
        emitted=emitted,
        notes=_notes(a),
        sizing=a.get("specscope.draft.sizing", ""),
    )


def _info(start_ns: int, end_ns: int, a: Attributes) -> RequestInfo:
    return RequestInfo(
        id=a["specscope.request.id"],
        arrival_ns=start_ns,
        admitted_ns=end_ns,
        prompt=unescape(a.get("specscope.request.prompt", "")).decode("utf-8", "surrogatepass"),
        prompt_tokens=np.asarray(a.get("specscope.request.prompt_tokens", ()), np.int32),
        params=SamplingParams.from_dict(json.loads(a["specscope.request.params"])),
        labels=json.loads(a["specscope.request.labels"]),
        title=unescape(a.get("specscope.request.title", "")).decode("utf-8", "surrogatepass"),
    )


def _info_of_root(name: str, start_ns: int, a: Attributes) -> RequestInfo:
    """What the root span tells of a request whose `queue` span is missing (it never ran, or the span was lost)."""
    params = SamplingParams(
        temperature=a["gen_ai.request.temperature"],
        top_k=a["gen_ai.request.top_k"],
        top_p=a["gen_ai.request.top_p"],
        frequency_penalty=a["gen_ai.request.frequency_penalty"],
        presence_penalty=a["gen_ai.request.presence_penalty"],
        max_tokens=a["gen_ai.request.max_tokens"],
        seed=a["gen_ai.request.seed"],
        stop=tuple(a.get("gen_ai.request.stop_sequences", ())),
    )
    labels = json.loads(a["specscope.request.labels"])
    return RequestInfo(name, start_ns, 0, "", np.zeros(0, np.int32), params, labels)
