"""A request's own span in the words of OpenTelemetry's GenAI conventions, for any viewer of model calls.

By semantic-conventions-genai 0.1.0; `gen_ai.latency.*` is of vLLM and SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specscope.trace.record.params import PARAM_NAMES, SamplingParams
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RunInfo
from specscope.trace.record.vocabulary import Vocabulary

CHAT, TEXT_COMPLETION = OPERATIONS = ("chat", "text_completion")
MESSAGE = 4000  # characters of a message
LABEL = "specscope.label."  # and its key: an attribute that can be searched for
LABELS, KEY, VALUE = 16, 100, 200  # labels that are, and their characters; `specscope.request.labels` has all
# The sampling parameters that the conventions name; others that were given are JSON in an attribute of ours
PARAMS = ("temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed")
OTHER_PARAMS = "specscope.request.other_params"
UNTOLD = tuple(sorted(PARAM_NAMES - {*PARAMS, "stop"}))  # where a span lacks that attribute
_DEFAULTS = SamplingParams().to_dict()
# The conventions' names of why a message ended
FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop"}


def operation(info: RequestInfo) -> str:
    """The conventions' name of what was asked."""
    return CHAT if info.chat else TEXT_COMPLETION


def attributes(end: RequestEnd, model: str) -> dict[str, Any]:
    """What was asked and what it took."""
    info, params = end.info, end.info.params
    failed = {"error.type": "_OTHER"} if end.reason is FinishReason.ERROR else {}
    return {
        "gen_ai.operation.name": operation(info),
        "gen_ai.provider.name": "specscope",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        **{f"gen_ai.request.{name}": getattr(params, name) for name in PARAMS},
        "gen_ai.request.stop_sequences": list(params.stop),
        "gen_ai.response.finish_reasons": [end.reason.value],
        "gen_ai.usage.input_tokens": len(info.prompt_tokens),
        "gen_ai.usage.output_tokens": len(end.output),
        "specscope.request.id": info.id,
        **failed,
        **_others(params),
    }


def _others(params: SamplingParams) -> dict[str, str]:
    """The parameters that were given and have no name in the conventions."""
    values = params.to_dict().items()
    told = (*PARAMS, "stop", "left_out")  # what privacy leaves out, the resource says
    given = {name: value for name, value in values if name not in told and value != _DEFAULTS.get(name)}
    return {OTHER_PARAMS: _json(given)} if given else {}


def messages(end: RequestEnd, run: RunInfo, vocabulary: Vocabulary) -> dict[str, str]:
    """The last message of the prompt and the output, as the conventions' JSON; of a long text a part."""
    info = end.info
    asked = (info.title if info.chat and run.is_ours else info.prompt) or vocabulary.text(info.prompt_tokens.tolist())
    answer = end.text(end.output.tolist(), vocabulary)
    asked = asked if len(asked) <= MESSAGE else "…" + asked[-MESSAGE:]
    answer = answer if len(answer) <= MESSAGE else answer[:MESSAGE] + "…"
    reason = {"finish_reason": FINISH.get(end.reason, end.reason.value)}
    return {
        "gen_ai.input.messages": _json([_message("user", asked)]),
        "gen_ai.output.messages": _json([_message("assistant", answer) | reason]),
    }


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text.encode("utf-8", "replace").decode()}]}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def labels(told: Mapping[str, str]) -> dict[str, str]:
    """Labels as attributes of their own, where they are short."""
    short = [(key, value) for key, value in told.items() if 0 < len(key) <= KEY and len(value) <= VALUE]
    return {LABEL + key: value for key, value in short[:LABELS]}
