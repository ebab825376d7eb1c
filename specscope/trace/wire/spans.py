"""Records to spans: the writing half of the codec. `unspan.py` is the other.

A request is a trace, or a part of its caller's: a root span with the children `queue`, `prefill` and `decode_step`.
An engine step is a span of a trace of its own with its phases as children; each decode_step links to it. Trace and
span ids are hashes of the run and of what the span stands for, so links and parents need no state. A request that
ended on more than one branch of an edited run has a root span for each end, of which the first has the children.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from specscope.trace.history.draw import draw_tree
from specscope.trace.record.notes import ParentNotes
from specscope.trace.record.privacy import Privacy, strip, told_fields
from specscope.trace.record.records import RequestEnd, RequestInfo, RequestStep, RunInfo, StepRecord, Verdict
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary, escape
from specscope.trace.wire import aggregate_span, schema_form, schema_method
from specscope.trace.wire.unfinite import dump_notes

SCOPE = "specscope"
KEPT = 20_000  # requests that have ended and are remembered
PASS = "draft_pass"  # the name of a span for each of the drafter's passes
MODEL_NAMES = ("target_path", "target_digest", "draft_path", "draft_digest")  # of RunInfo, where they are known

TREE_ARRAYS = {"token": np.int32, "parent": np.int32, "q": np.float32, "drawn": np.uint8}
VERDICT_ARRAYS = {
    "outcome": np.uint8,
    "p": np.float32,
    "p_trial": np.float32,
    "q_trial": np.float32,
    "accept_prob": np.float64,
    "coin": np.float64,
    "residual_mass": np.float64,
    "path": np.int32,
}
NOTES_ARRAYS = {
    "prob": np.float32,
    "score": np.float32,
    "dropped_token": np.int32,
    "dropped_parent": np.int32,
    "dropped_score": np.float32,
    "rows": np.int32,
    "fed_token": np.int32,
    "fed_position": np.int32,
    "fed_norms": np.float32,  # row after row
    "draw_margin": np.float64,
}


# What holds nothing but what a level leaves out of the records: there it is absent, as other evidence that is not told
ABSENT = {
    Privacy.NO_TEXT: frozenset(("specscope.request.prompt", "specscope.request.title", "specscope.output.text")),
    Privacy.NO_TOKENS: frozenset(
        (
            "specscope.request.prompt_tokens",
            "specscope.output.tokens",
            "specscope.final.token",
            "specscope.tree.token",
            "specscope.draft.dropped_token",
            "specscope.draft.fed_token",
        )
    ),
}


class SpanLevel(StrEnum):
    """How much of a run becomes spans. Captures are always `trees`: nothing less can be replayed."""

    OFF = "off"
    REQUESTS = "requests"  # a root span a request
    STEPS = "steps"  # and a span a step, with counts
    TREES = "trees"  # and the whole evidence


class Span(NamedTuple):
    """A finished span as plain values, before any exporter's own form."""

    name: str
    trace: int  # 128-bit id
    id: int  # 64-bit id
    parent: int  # 64-bit id, 0 for a root
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]  # str, bool, int, float, or lists of one of them
    links: tuple[tuple[int, int], ...] = ()  # (trace, span) ids


def own_trace(run_id: str, *what: object) -> int:
    """The id of a trace of ours: of a request, by its id, or of an engine step, by "step" and its number."""
    return int.from_bytes(blake2b(f"{run_id}/{what}".encode(), digest_size=16).digest(), "big")


@dataclass
class Encoder:
    """Turns one run's records into spans."""

    run: RunInfo
    vocabulary: Vocabulary
    level: SpanLevel = SpanLevel.TREES
    _callers: dict[str, tuple[int, int]] = field(default_factory=dict)  # a caller's trace and span, by request
    # Requests that have a root span, with their callers: on another branch they may go on
    _ended: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.run.privacy:  # what has no words can tell none
            self.vocabulary = Vocabulary()

    def encode(self, record: StepRecord) -> list[Span]:
        """The spans that end with this step, children before parents."""
        privacy = self.run.privacy
        spans = self._encode(strip(record, privacy))
        absent = frozenset[str]().union(*(names for level, names in ABSENT.items() if level <= privacy))
        if not absent:
            return spans
        return [span._replace(attributes=_without(span.attributes, absent)) for span in spans]

    def _encode(self, record: StepRecord) -> list[Span]:
        spans: list[Span] = []
        if self.level is SpanLevel.OFF:
            return spans
        for info in (*record.admitted, *(end.info for end in record.finished)):
            if info.traceparent:
                _, trace, above, _ = info.traceparent.split("-")
                self._callers[info.id] = (int(trace, 16), int(above, 16))
        spans += [self._queue(info, record, info.admitted_ns) for info in record.admitted]
        never = [end for end in record.finished if not end.info.admitted_ns]
        spans += [self._queue(end.info, record, end.finished_ns) for end in never]
        if self.level is not SpanLevel.REQUESTS:
            for part in record.requests:
                spans += self._request_step(part, record)
            spans += self._engine_step(record)
        spans += [self._root(end, record) for end in record.finished]
        for end in record.finished:
            self._ended[end.info.id] = self._callers.pop(end.info.id, None) or self._ended.get(end.info.id)
        while len(self._ended) > KEPT:
            del self._ended[next(iter(self._ended))]
        return spans

    def _caller(self, name: str) -> tuple[int, int] | None:
        return self._callers.get(name) or self._ended.get(name)

    def _of(self, record: StepRecord) -> dict[str, Any]:
        """What every span of a step says: its number, and its branch but for the first."""
        branch = {"specscope.branch": record.branch} if record.branch else {}
        return {"specscope.step": record.step} | branch

    def _trace(self, *what: object) -> int:
        return own_trace(self.run.run_id, *what)

    def _request_trace(self, name: str) -> int:
        """A trace of its own, or the caller's."""
        caller = self._caller(name)
        return self._trace(name) if caller is None else caller[0]

    def _span(self, *what: object) -> int:
        return int.from_bytes(blake2b(f"{self.run.run_id}/{what}".encode(), digest_size=8).digest(), "big") or 1

    def _queue(self, info: RequestInfo, record: StepRecord, end_ns: int) -> Span:
        """The wait for admission, or for an end without it."""
        attributes: dict[str, Any] = self._of(record) | {
            "specscope.request.id": info.id,
            "specscope.request.params": json.dumps(info.params.to_dict()),
            "specscope.request.labels": json.dumps(dict(info.labels)),
            "specscope.request.prompt_length": len(info.prompt_tokens),
            "specscope.request.prompt": escape(info.prompt.encode("utf-8", "surrogatepass")),
            "specscope.request.title": escape(info.title.encode("utf-8", "surrogatepass")),
            "specscope.request.prompt_tokens": info.prompt_tokens.tolist(),
        }
        if info.traceparent:
            attributes["specscope.request.traceparent"] = info.traceparent
        trace, root = self._request_trace(info.id), self._span(info.id)
        if not info.admitted_ns:
            attributes["specscope.request.admitted"] = False
        own = self._span(info.id, "queue", *((record.branch,) if record.branch else ()))
        return Span("queue", trace, own, root, info.arrival_ns, end_ns, attributes)

    def _request_step(self, part: RequestStep, record: StepRecord) -> Iterator[Span]:
        """`prefill` where prompt tokens were fed, `decode_step` where a verdict was given; both may be."""
        trace, root = self._request_trace(part.request), self._span(part.request)
        link = ((self._trace("step", record.step), self._span("step", record.step)),)
        common: dict[str, Any] = self._of(record) | {
            "specscope.request.id": part.request,
            "specscope.request.step": part.index,
            "specscope.context_len": part.context_len,
            "specscope.prefill_tokens": part.prefill_tokens,
        }
        for name in ("blocks", "moved"):
            if len(values := getattr(part, name)):
                common[f"specscope.kv.{name}"] = values.tolist()
        if part.found:
            common["specscope.kv.found"] = part.found
        start, end = record.start_ns, record.end_ns
        if part.prefill_tokens or part.verdict is None:
            with_decode = {"specscope.prefill.reaches_root": part.verdict is not None}
            own = self._span(part.request, record.step, "prefill")
            yield Span("prefill", trace, own, root, start, end, common | with_decode, link)
        if part.verdict is not None:
            own = self._span(part.request, record.step, "decode")
            attributes = common | self._summary(part, part.verdict)
            if self.level is SpanLevel.TREES:
                attributes |= self._evidence(part, part.verdict)
            yield Span("decode_step", trace, own, root, start, end, attributes, link)

    def _summary(self, part: RequestStep, verdict: Verdict) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "specscope.drafter": part.drafter,
            "specscope.drafted": len(part.tree),
            "specscope.accepted": verdict.accepted,
            "specscope.emitted": part.emitted,
            "specscope.final.kind": verdict.kind.value,
        }
        if part.notes is not None:
            attributes["specscope.draft.dropped"] = len(part.notes.dropped_token)
        if len(verdict.forced):
            attributes["specscope.forced"] = verdict.forced.tolist()
        if part.sizing:
            attributes["specscope.draft.sizing"] = part.sizing
        if part.preceded is not None:
            attributes["specscope.preceded"] = part.preceded.value
        return attributes | {"specscope.rule": part.rule}

    def _evidence(self, part: RequestStep, verdict: Verdict) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "specscope.final.token": verdict.token,
            "specscope.final.p": verdict.final_p,
            "specscope.final.coin": verdict.final_coin,
            "specscope.final.margin": verdict.final_margin,
        }
        if len(part.tree):
            attributes |= {f"specscope.tree.{name}": getattr(part.tree, name).tolist() for name in TREE_ARRAYS}
            attributes |= {f"specscope.verdict.{name}": getattr(verdict, name).tolist() for name in VERDICT_ARRAYS}
        if part.notes is not None:
            arrays = {name: getattr(part.notes, name).ravel().tolist() for name in NOTES_ARRAYS}
            attributes |= {f"specscope.draft.{name}": values for name, values in arrays.items() if values}
            attributes["specscope.draft.cached"] = part.notes.cached
        if part.parents is not None:
            arrays = told_fields(vars(part.parents), self.run.privacy, ParentNotes)  # Parents: schema_parents.py
            attributes["specscope.parents"] = dump_notes(arrays | self._named(part, part.parents))
        if part.method is not None:
            attributes |= schema_method.written(part.method)
        attributes |= schema_form.written(part, self.run.privacy)
        return attributes | self._texts(part, part.tree, verdict)

    def _named(self, part: RequestStep, parents: ParentNotes) -> dict[str, Any]:
        """The bytes of the likeliest tokens, reversibly."""
        pieces = self.vocabulary.pieces
        tokens = parents.named(part.tokens_shown)
        return {"text": [escape(pieces[token]) for token in tokens]} if all(t in pieces for t in tokens) else {}

    def _texts(self, part: RequestStep, tree: DraftTree, verdict: Verdict) -> dict[str, Any]:
        """The tokens' bytes, reversibly, and the drawing that people read in Jaeger."""
        pieces, tokens = self.vocabulary.pieces, part.tokens_shown
        attributes: dict[str, Any] = {"specscope.drawing": draw_tree(part, self.vocabulary)}
        if all(token in pieces for token in tokens):
            attributes["specscope.tree.text"] = [escape(pieces[token]) for token in tokens]
        special = [token for token in tokens if token in self.vocabulary.special]
        return attributes | {"specscope.tree.special": special} if special else attributes

    def _engine_step(self, record: StepRecord) -> Iterator[Span]:
        trace, root = self._trace("step", record.step), self._span("step", record.step)
        for phase in record.phases:
            own = self._span("step", record.step, phase.name)
            yield Span(phase.name, trace, own, root, phase.start_ns, phase.end_ns, self._of(record))
        draft = self._span("step", record.step, "draft")
        for one in record.passes:
            own, name = self._span("step", record.step, "pass", one.name), {"specscope.pass": one.name}
            yield Span(PASS, trace, own, draft, one.start_ns, one.end_ns, name | self._of(record))
        attributes = self._of(record) | {
            "specscope.running": record.running,
            "specscope.waiting": record.waiting,
            "specscope.blocks_used": record.blocks_used,
            "specscope.blocks_free": record.blocks_free,
            "specscope.speculation": record.speculation,
            "specscope.speculation_off": record.speculation_off,
            "specscope.phase.names": [phase.name for phase in record.phases],
            "specscope.phase.times": [t for phase in record.phases for t in (phase.start_ns, phase.end_ns)],
            "specscope.pass.names": [one.name for one in record.passes],
            "specscope.pass.times": [t for one in record.passes for t in (one.start_ns, one.end_ns)],
            "specscope.requests": [part.request for part in record.requests],
            "specscope.admitted": [info.id for info in record.admitted],
            "specscope.preempted": list(record.preempted),
            "specscope.finished": [end.info.id for end in record.finished],
        }
        if record.device_ns:
            attributes["specscope.phase.device_ns"] = list(record.device_ns)
        if record.budget is not None:
            attributes["specscope.budget"] = record.budget
        if record.flight is not None:
            attributes["specscope.flight"] = list(dataclasses.astuple(record.flight))
        cached = {"specscope.queried": record.queried, "specscope.blocks_cached": record.blocks_cached}
        attributes |= {name: count for name, count in cached.items() if count}
        if record.after is not None:
            attributes["specscope.after"] = record.after
        if record.rewound:
            attributes["specscope.rewound"] = True
        if record.left_out is not None:
            attributes |= {f"specscope.left_out.{name}": count for name, count in vars(record.left_out).items()}
        if record.aggregate is not None:
            attributes |= aggregate_span.attributes(record.aggregate)
        yield Span("engine_step", trace, root, 0, record.start_ns, record.end_ns, attributes)

    def _root(self, end: RequestEnd, record: StepRecord) -> Span:
        """`text_completion {model}` with the GenAI conventions' attributes, for any viewer of model calls."""
        params, info = end.info.params, end.info
        attributes: dict[str, Any] = self._of(record) | {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "specscope",
            "gen_ai.request.model": self.run.target,
            "gen_ai.response.model": self.run.target,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.stop_sequences": list(params.stop),
            "gen_ai.response.finish_reasons": [end.reason.value],
            "gen_ai.usage.input_tokens": len(info.prompt_tokens),
            "gen_ai.usage.output_tokens": len(end.output),
            "specscope.request.id": info.id,
            "specscope.finish.stop": escape(end.stop.encode("utf-8", "surrogatepass")),
            "specscope.finish.error": end.error,
            "specscope.request.labels": json.dumps(dict(info.labels)),
            "specscope.output.tokens": end.output.tolist(),
            "specscope.output.text": self.vocabulary.text(end.output.tolist()),
        }
        if end.sampled is not None:
            told = end.sampled
            attributes |= {"specscope.sampling.reason": told.reason.value, "specscope.sampling.early": told.early}
            attributes |= {"specscope.sampling.ratio": told.ratio} if told.ratio else {}
        name = f"text_completion {self.run.target}"
        own = self._span(info.id, "root", record.step) if info.id in self._ended else self._span(info.id)
        above = (self._caller(info.id) or (0, 0))[1]
        return Span(name, self._request_trace(info.id), own, above, info.arrival_ns, end.finished_ns, attributes)


def _without(attributes: dict[str, Any], absent: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in absent}


def resource_attributes(run: RunInfo) -> dict[str, Any]:
    """RunInfo as resource attributes, which make a capture self-contained; `unspan.run_info` reads it back."""
    run = strip(run, run.privacy)
    return {
        "service.name": "specscope",
        "service.version": run.versions.get("specscope", ""),
        "service.instance.id": run.run_id,
        "specscope.run.id": run.run_id,
        "specscope.run.target": run.target,
        "specscope.run.revision": run.revision,
        "specscope.run.drafter": run.drafter,
        "specscope.run.draft_model": run.draft_model,
        "specscope.run.tree": run.tree,
        "specscope.run.device": run.device,
        "specscope.run.dtype": run.dtype,
        "specscope.run.backend": run.backend,
        "specscope.run.seed": run.seed,
        "specscope.run.eos_tokens": list(run.eos_tokens),
        "specscope.run.max_context": run.max_context,
        "specscope.run.blocks": run.blocks,
        "specscope.run.block_size": run.block_size,
        "specscope.run.params": json.dumps(dict(run.params)),
        "specscope.run.versions": json.dumps(dict(run.versions)),
        "specscope.run.aux_layers": list(run.aux_layers),
        "specscope.run.draft_vocab": run.draft_vocab,
        **({"specscope.run.draft_tokens": run.draft_tokens} if run.draft_tokens else {}),
        "specscope.run.evidence": run.evidence,
        "specscope.run.rule": run.rule,
        "specscope.run.costs": run.costs,
        "specscope.run.text": run.tells_text,
        **({"specscope.run.tokens": False} if not run.tells_tokens else {}),
        **({"specscope.run.sampling": run.sampling} if run.sampling else {}),
        **{f"specscope.run.{name}": value for name in MODEL_NAMES if (value := getattr(run, name))},
    } | ({"specscope.run.speculation": json.dumps(dict(run.speculation))} if run.speculation else {})
