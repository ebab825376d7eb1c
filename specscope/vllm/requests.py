"""What the witness knows of each of vLLM's requests, and how vLLM's parameters read in specscope's terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specscope.errors import UserError
from specscope.trace.inside.recorder import Known, Recorder, label, params_of
from specscope.trace.record.params import FORM, LIMITING, SamplingParams, StructuredOutputs
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo
from specscope.vllm.scheduling import Arrival, Ended

# How vLLM's server begins the ids of requests; offline they are numbers
CHAT, SERVED = "chatcmpl-", ("chatcmpl-", "cmpl-")
SAME = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LABELS = (*LIMITING, "repetition_detection")
OTHER_FORMS = ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,
}


def known(recorder: Recorder, name: str, prompt: list[int], params: Any, arrival: Arrival, admitted_ns: int) -> Known:
    """A request that vLLM has admitted. `params`: its SamplingParams, None for what is no generation."""
    info = recorder.info(
        name,
        prompt,
        read_params(params),
        arrival_ns=arrival.arrival_ns,
        admitted_ns=admitted_ns,
        traceparent=_traceparent(arrival.trace_headers),
        chat=name.startswith(CHAT),
        served=name.startswith(SERVED),
    )
    most = getattr(params, "max_tokens", None)
    return Known(info, stops=_stops(params), **({} if most is None else {"most": most}))


def _traceparent(headers: Mapping[str, str]) -> str:
    """The span of the client's that vLLM's own `llm_request` has as its parent, too; "" where it sent none."""
    context = get_current_span(TraceContextTextMapPropagator().extract(headers)).get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _stops(params: Any) -> frozenset[int]:
    eos = None if getattr(params, "ignore_eos", False) else getattr(params, "eos_token_id", None)
    return frozenset((*(getattr(params, "stop_token_ids", None) or ()), *(() if eos is None else (eos,))))


def read_params(params: Any) -> tuple[SamplingParams, dict[str, str]]:
    """(The parameters that specscope has, the others as labels)."""
    if params is None:
        return SamplingParams(), {}
    labels = {name: label(value) for name in LABELS if (value := getattr(params, name, None))}
    asked = getattr(params, FORM, None)
    form = None if asked is None or params.ignore_eos else _form(asked)  # ours ends with the form, whatever else
    if asked is not None and form is None:
        labels[FORM] = label(asked)
    seed = getattr(params, "seed", None)
    if seed is None or seed < 0:  # a seed is a number of ours from 0 on; vLLM takes others
        labels["seed"] = "none" if seed is None else str(seed)
    values = {name: getattr(params, name) for name in SAME} | {
        "top_k": max(params.top_k or 0, 0),
        "min_p": getattr(params, "min_p", 0.0) or 0.0,  # vLLM refuses this one, and a bias, where it speculates
        "logit_bias": dict(getattr(params, "logit_bias", None) or {}),
        "seed": max(seed or 0, 0),
        "max_tokens": SamplingParams().max_tokens if params.max_tokens is None else params.max_tokens,
        "stop": tuple(params.stop or ()),
        "ignore_eos": bool(params.ignore_eos),
        "stop_token_ids": tuple(params.stop_token_ids or ()),
        "min_tokens": getattr(params, "min_tokens", 0) or 0,
        "structured_outputs": form,
    }
    return params_of(values, labels)


def _form(asked: Any) -> StructuredOutputs | None:
    """vLLM's StructuredOutputsParams as specscope has them; None where it has no word for what is asked."""
    if any(getattr(asked, name, None) for name in OTHER_FORMS):
        return None
    kinds = [field.name for field in dataclasses.fields(StructuredOutputs)]
    given = {name: value for name in kinds if (value := getattr(asked, name, None)) not in (None, False)}
    try:
        return StructuredOutputs(**given | ({"choice": tuple(given["choice"])} if "choice" in given else {}))
    except UserError:
        return None


def ended(end: Ended, info: RequestInfo, eos: tuple[int, ...]) -> RequestEnd:
    """vLLM's end of a request. It calls both EOS and stop tokens `stop`; a stop string is an abort to EngineCore."""
    reason = REASONS.get(end.reason, FinishReason.ERROR)
    if reason is FinishReason.STOP and end.output and end.output[-1] in eos and not end.stop:
        reason = FinishReason.EOS
    if reason is FinishReason.CANCELLED and info.params.stop:
        reason = FinishReason.STOP
    error = end.reason if reason is FinishReason.ERROR else ""
    return RequestEnd(info, end.finished_ns, reason, "", np.array(end.output, np.int32), error)
