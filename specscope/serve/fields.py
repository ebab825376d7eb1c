"""The types of request fields: their bounds are the schema on the OpenAPI page, and what the decoder checks."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from specscope.trace.record.params import MOST_LOGPROBS, MOST_TOKENS

MODEL, TOKEN = "x-specscope-model", "x-specscope-token"  # the page fills in this server's models and vocabulary
REFUSED = "x-specscope-refused"  # what to do instead, of a field that is not implemented

Number = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MOST_TOKENS, extra_json_schema={TOKEN: True})]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
PromptText = Annotated[str, Meta(min_length=1)]
_MANY: Any = {"type": "array", "minItems": 1, "maxItems": 1024}
_TOKEN: Any = {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS, TOKEN: True}
_TOKENS: Any = {"type": "array", "items": _TOKEN, "minItems": 1, "maxItems": 2**20}
_TEXT: Any = {"type": "string", "minLength": 1}
# Text, texts, token ids or lists of them: msgspec has no union of lists, so what is mixed is refused later (asked.py)
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
    """Of a field that would change the output and is not implemented: null and these values are taken."""
    return Meta(extra_json_schema={"enum": [None, *harmless], REFUSED: instead})
