"""What clients may ask: the bodies of /v1/completions and /v1/chat/completions, under OpenAI's and vLLM's names.

Unknown fields are ignored. Those that would change the output and are not implemented are declared by `only`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from specscope.trace.record.params import MOST_LOGPROBS, MOST_TOKENS

# The types of request fields: their bounds are the schema on the OpenAPI page, and what the decoder checks.

MODEL, TOKEN = "x-specscope-model", "x-specscope-token"  # the page fills in this server's models and vocabulary
REFUSED = "x-specscope-refused"  # holds what to do instead of using a field that is not implemented

Number = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MOST_TOKENS, extra_json_schema={TOKEN: True})]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
PromptText = Annotated[str, Meta(min_length=1)]
_MANY: Any = {"type": "array", "minItems": 1, "maxItems": 1024}
_TOKEN: Any = {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS, TOKEN: True}
_TOKENS: Any = {"type": "array", "items": _TOKEN, "minItems": 1, "maxItems": 2**20}
_TEXT: Any = {"type": "string", "minLength": 1}
# Text, texts, token ids or lists of them: msgspec has no union of lists, so what is mixed is refused later (service.py)
PROMPT: Any = {"anyOf": [_TEXT, {**_MANY, "items": _TEXT}, _TOKENS, {**_MANY, "items": _TOKENS}]}
CompletionPrompt = PromptText | Annotated[list[PromptText | TokenId | TokenIds], Meta(min_length=1, max_length=2**20)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
Stop = Annotated[list[StopText], Meta(max_length=64)]
LogitBias = Annotated[
    dict[Annotated[int, Meta(ge=0, le=MOST_TOKENS)], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(
        max_length=10_000,
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}},
    ),
]
Logprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
ModelName = Annotated[str, Meta(max_length=1000, extra_json_schema={MODEL: True})]


def only(*harmless: Any, instead: str = "leave it out") -> Meta:  # noqa: ANN401
    """For a field that would change the output and is not implemented: only null and these values are accepted."""
    return Meta(extra_json_schema={"enum": [None, *harmless], REFUSED: instead})


STRUCTURED = "use structured_outputs"


class StreamOptions(msgspec.Struct):
    """What a stream reports beside the output."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # with it: the usage so far on every chunk


class JsonSchema(msgspec.Struct):
    """A JSON schema with a name, in OpenAI's form."""

    name: Annotated[str, Meta(min_length=1, max_length=1000)]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(msgspec.Struct):
    """vLLM's way to ask for a form: exactly one of these. trace/record/structured.py checks them."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Any, only()] = None


class Sampling(msgspec.Struct, kw_only=True):
    """The fields that both kinds of request have."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None  # 1 where it is left out
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e12)] | None = None
    logit_bias: LogitBias | None = None
    stop: StopText | Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] | None = None
    max_tokens: Tokens | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    best_of: Annotated[Any, only(1, instead="use n")] = None
    use_beam_search: Annotated[Any, only(False)] = None
    prompt_logprobs: Annotated[Any, only()] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    bad_words: Annotated[Any, only([], instead="use logit_bias")] = None
    allowed_token_ids: Annotated[Any, only(instead="use logit_bias")] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    logits_processors: Annotated[Any, only([])] = None
    repetition_detection: Annotated[Any, only()] = None
    return_token_ids: Annotated[Any, only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, only(False)] = None
    guided_json: Annotated[Any, only(instead=STRUCTURED)] = None
    guided_regex: Annotated[Any, only(instead=STRUCTURED)] = None
    guided_choice: Annotated[Any, only(instead=STRUCTURED)] = None
    guided_grammar: Annotated[Any, only(instead=STRUCTURED)] = None


class CompletionRequest(Sampling, kw_only=True):
    """The body of /v1/completions."""

    prompt: CompletionPrompt
    echo: bool | None = None
    logprobs: Logprobs | None = None
    suffix: Annotated[Any, only("")] = None
    prompt_embeds: Annotated[Any, only()] = None
    add_special_tokens: Annotated[Any, only(True)] = None


class TextPart(msgspec.Struct):
    """A piece of a message's text; images and sound are not implemented."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct):
    """One turn. What the model's chat template does with its role is the template's business."""

    role: Annotated[str, Meta(min_length=1, max_length=100)]
    content: str | Annotated[list[TextPart], Meta(max_length=1000)] | None = None
    tool_calls: Annotated[Any, only([])] = None

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        return {"role": self.role, "content": text}


class ChatRequest(Sampling, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Tokens | None = None  # wins over max_tokens; without both, what the context has left
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    chat_template: Annotated[Any, only(instead="the model's own is used")] = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    documents: Annotated[Any, only([])] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    echo: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None
