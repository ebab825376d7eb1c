"""What a request asks of the engine: its prompts and its SamplingParams."""

from __future__ import annotations

from typing import Any

import msgspec

from specscope.engine.prompt_encoder import Prompt
from specscope.errors import UserError
from specscope.serve.errors import ApiError
from specscope.serve.requests import ChatRequest, CompletionRequest, ResponseFormat, Sampling
from specscope.trace.record.params import SamplingParams

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
SAME = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "min_tokens")


def prompts_of(asked: Sampling) -> list[Prompt]:
    """Each prompt, as the engine reads it. Raises ApiError."""
    if isinstance(asked, ChatRequest):
        return [[message.plain() for message in asked.messages]]
    assert isinstance(asked, CompletionRequest)
    prompt: Any = asked.prompt
    kinds = {type(one) for one in prompt} if isinstance(prompt, list) else {str}
    if len(kinds) > 1:
        raise ApiError(400, "prompt: give text, token ids, or a list of either, not a mixture", "prompt")
    if isinstance(prompt, str) or kinds == {int}:
        return [prompt]
    if len(prompt) > 1024:
        raise ApiError(400, "prompt: give at most 1024 prompts", "prompt")
    return list(prompt)


def template_of(asked: Sampling) -> dict[str, Any]:
    """chat_template_kwargs of a chat."""
    return (asked.chat_template_kwargs or {}) if isinstance(asked, ChatRequest) else {}


def params_of(asked: Sampling, seed: int, room: int) -> SamplingParams:
    """Its sampling parameters. `seed`: where it gives none; `room`: tokens that the context has left for a chat.

    Raises ApiError that names the field.
    """
    _check_together(asked)
    values: dict[str, Any] = {name: getattr(asked, name) for name in SAME}
    values["temperature"] = 1.0 if asked.temperature is None else asked.temperature
    values["top_k"] = None if asked.top_k is None else max(asked.top_k, 0)
    values["seed"] = seed if asked.seed is None else asked.seed % 2**63
    values["stop"] = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    values["stop_token_ids"] = tuple(asked.stop_token_ids or ())
    values["logit_bias"] = asked.logit_bias
    values["max_tokens"], values["logprobs"] = _by_kind(asked, room)
    values["structured_outputs"] = structured_of(asked)
    try:
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except UserError as error:
        raise ApiError(400, str(error), str(error).split(maxsplit=1)[0].rstrip(":")) from None


def _check_together(asked: Sampling) -> None:
    """What goes only with something else. Raises ApiError."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if isinstance(asked, ChatRequest) and asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if isinstance(asked, CompletionRequest) and asked.echo and asked.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not implemented: leave one out", "echo")


def _by_kind(asked: Sampling, room: int) -> tuple[int, int | None]:
    """(max_tokens, logprobs), which the two kinds of request give in their own ways."""
    if isinstance(asked, ChatRequest):
        given = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return given or max(room, 1), (asked.top_logprobs or 0) if asked.logprobs else None
    assert isinstance(asked, CompletionRequest)
    return asked.max_tokens or DEFAULT_TOKENS, asked.logprobs


def structured_of(asked: Sampling) -> dict[str, Any] | None:
    """The form of the output, by vLLM's names; response_format wins, as in vLLM. Raises ApiError."""
    form = asked.response_format
    if form is not None and form.type != "text":
        return _of_format(form)
    if asked.structured_outputs is None:
        return None
    given = msgspec.structs.asdict(asked.structured_outputs)
    values = {name: value for name, value in given.items() if value is not None}
    return values | ({"choice": tuple(values["choice"])} if "choice" in values else {})


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None or form.json_schema.schema is None:
        raise ApiError(400, "response_format: json_schema needs a schema", "response_format")
    return {"json": form.json_schema.schema}
