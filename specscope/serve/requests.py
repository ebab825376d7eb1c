"""What clients may ask: the bodies of /v1/completions and /v1/chat/completions, under OpenAI's and vLLM's names.

Unknown fields are ignored, but for those of REFUSED.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from specscope.serve.errors import ApiError
from specscope.trace.checked import decoded
from specscope.trace.record.params import MOST_LOGPROBS, MOST_TOKENS

Refusals = dict[str, tuple[Sequence[Any], str]]


def _not_here(names: str, *harmless: Any, instead: str = "leave it out") -> Refusals:  # noqa: ANN401
    return dict.fromkeys(names.split(), (harmless, instead))


# Fields that would change the output and are not implemented: their values beside null that change nothing, and what to
# do instead. They are refused in a body, in its structured_outputs and in each message.
REFUSED: Refusals = {
    **_not_here("prompt_logprobs truncate_prompt_tokens repetition_detection structural_tag prompt_embeds audio"),
    **_not_here("web_search_options reasoning_effort thinking_token_budget logprob_token_ids whitespace_pattern"),
    **_not_here("use_beam_search return_token_ids return_tokens_as_token_ids echo continue_final_message", False),
    **_not_here("disable_any_whitespace disable_additional_properties watermarking", False),
    **_not_here("return_token_offsets return_prompt_text", False),
    **_not_here("skip_special_tokens add_generation_prompt", True),
    **_not_here("logits_processors tools tool_calls functions documents", []),
    **_not_here("tool_choice function_call", "none", "auto"),
    **_not_here("modalities", ["text"]),
    **_not_here("suffix", ""),
    **_not_here("best_of", 1, instead="use n"),
    **_not_here("bad_words", [], instead="use logit_bias"),
    **_not_here("allowed_token_ids", instead="use logit_bias"),
    **_not_here("guided_json guided_regex guided_choice guided_grammar", instead="use structured_outputs"),
    **_not_here("chat_template", instead="the model's is used"),
}

# The types of request fields: what the decoder checks.

Number = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
PromptText = Annotated[str, Meta(min_length=1)]
# Text, texts, token ids or lists of them: msgspec has no union of lists, so what is mixed is refused later (service.py)
CompletionPrompt = PromptText | Annotated[list[PromptText | TokenId | TokenIds], Meta(min_length=1, max_length=2**20)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
Stop = Annotated[list[StopText], Meta(max_length=64)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=10_000)]
Logprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
ModelName = Annotated[str, Meta(max_length=1000)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None  # a last chunk with the usage


class JsonSchema(msgspec.Struct):
    """A JSON schema with a name, in OpenAI's form."""

    name: Annotated[str, Meta(min_length=1, max_length=1000)]
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(msgspec.Struct):
    """vLLM's way to ask for a form: exactly one of these. trace/record/params.py checks them."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


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


class CompletionRequest(Sampling, kw_only=True):
    """The body of /v1/completions."""

    prompt: CompletionPrompt
    logprobs: Logprobs | None = None


class TextPart(msgspec.Struct):
    """A piece of a message's text; images and sound are not implemented."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct):
    """One turn. What the model's chat template does with its role is the template's business."""

    role: Annotated[str, Meta(min_length=1, max_length=100)]
    content: str | Annotated[list[TextPart], Meta(max_length=1000)] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        return {"role": self.role, "content": text}


class ChatRequest(Sampling, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Tokens | None = None  # wins over max_tokens; without both, all that fit
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None


S = TypeVar("S", bound=Sampling)


def decode(body: bytes | bytearray, kind: type[S]) -> S:
    """The body as a struct. Raises ApiError that names the field."""
    try:
        asked, fields = decoded(body, kind), decoded(body, dict[str, Raw])
        in_chats = kind is ChatRequest  # whose template has the special tokens
        _refuse(fields, REFUSED | _not_here("add_special_tokens", not in_chats))
        if asked.structured_outputs is not None:
            _refuse(decoded(bytes(fields["structured_outputs"]), dict[str, Raw]), REFUSED, "structured_outputs.")
        turns = decoded(bytes(fields["messages"]), list[dict[str, Raw]]) if in_chats else ()
        for index, turn in enumerate(turns):
            _refuse(turn, REFUSED, f"messages[{index}].")
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or _quoted(message)
        raise ApiError(400, f"{param}: {message}" if path else message, param) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return asked


def _quoted(message: str) -> str | None:
    """The name of the field in a message about a missing one."""
    match = re.search(r"field `(\w+)`", message)
    return match and match[1]


def _refuse(fields: Mapping[str, Raw], refusals: Refusals, above: str = "") -> None:
    """Refuse what is not implemented and would change the output. Raises ApiError that names the field."""
    for name in filter(refusals.__contains__, fields):
        harmless, instead = refusals[name]
        value = decoded(bytes(fields[name]))
        if not any(type(value) is type(allowed) and value == allowed for allowed in (None, *harmless)):
            param = f"{above}{name}"
            raise ApiError(400, f"{param} is not implemented: {instead}", param)
