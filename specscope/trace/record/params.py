"""SamplingParams: what a request asks of the sampler, StructuredOutputs the form that its output must have.

And what a judge must know before it computes p and q again: what limits a request and is not in the capture (labels
that another engine's witness sets, forms, parameters that were left out), and what engines do in ways of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from specscope.errors import UserError
from specscope.trace.checked import Flag, Seed, Text, checked, decoded, field_types, short
from specscope.trace.record.privacy import IDS, LEFT_OUT, TEXT, Privacy, withheld

LONGEST_SCHEMA = 64 * 1024  # characters of a JSON schema, and of a grammar
LONGEST_REGEX = 8 * 1024
DEEPEST = 64  # arrays and objects in one another
MOST_CHOICES = 1000

Choice = Annotated[Text, Meta(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of these, by vLLM's names. Raises UserError, naming the field, for what cannot be used."""

    # a JSON schema as JSON text; a mapping is taken and kept as text
    json: Annotated[
        Annotated[str, Meta(max_length=LONGEST_SCHEMA)] | Mapping[str, Any] | None,
        Meta(description=f"a JSON schema of at most {LONGEST_SCHEMA >> 10} KiB"),
    ] = None
    # of the whole output, as if it began with ^ and ended with $
    regex: Annotated[
        Annotated[Text, Meta(min_length=1, max_length=LONGEST_REGEX)] | None,
        Meta(description=f"a regular expression, not empty, of at most {LONGEST_REGEX >> 10} KiB"),
    ] = None
    # the output is one of these texts
    choice: Annotated[
        Annotated[tuple[Choice, ...], Meta(min_length=1, max_length=MOST_CHOICES)] | None,
        Meta(description=f"1 to {MOST_CHOICES} non-empty texts of at most 1000 characters"),
    ] = None
    # EBNF as llama.cpp writes it (GBNF); the first rule is `root`
    grammar: Annotated[
        Annotated[Text, Meta(min_length=1, max_length=LONGEST_SCHEMA)] | None,
        Meta(description=f"a grammar in EBNF, not empty, of at most {LONGEST_SCHEMA >> 10} KiB"),
    ] = None
    json_object: bool = False  # any JSON object

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            try:  # as text, in its own order: a grammar requires the properties in that order
                object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False, allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                raise UserError("structured_outputs: json cannot be written as JSON: give the schema as text") from None
        for name, kind in _TYPES.items():
            object.__setattr__(self, name, checked(getattr(self, name), kind, f"structured_outputs: {name}"))
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise UserError(f"structured_outputs needs exactly one of {', '.join(_TYPES)}; given: {names}")
        if self.json is not None:
            _check_json(self.text)
        elif any("\0" in text for text in self.choice or (self.text,)):
            raise UserError(f"structured_outputs: {self.kind} contains a NUL character: remove it")

    @property
    def kind(self) -> str:
        return next(name for name in _TYPES if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The source as one text: a JSON list for choices, empty for json_object."""
        value = getattr(self, self.kind)
        if value is True:
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        value = getattr(self, self.kind)
        return {self.kind: list(value) if isinstance(value, tuple) else value}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> StructuredOutputs:
        """The object that `to_dict` described. Other names raise UserError."""
        unknown = [name for name in values if name not in _TYPES]
        if unknown:
            raise UserError(f"structured_outputs has no {short(unknown[0])}: use {', '.join(_TYPES)}")
        return StructuredOutputs(**values)


_TYPES = field_types(StructuredOutputs)


def _check_json(text: str) -> None:
    """Check that a schema is JSON, an object or true, and not too deep. Raises UserError."""
    try:
        schema = decoded(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError) as error:
        where = f" ({error.msg}, at column {error.colno})" if isinstance(error, orjson.JSONDecodeError) else ""
        raise UserError(f"structured_outputs: json is not valid JSON{where}") from None
    if not isinstance(schema, dict) and schema is not True:
        raise UserError("structured_outputs: json must be a JSON schema: an object, or true for any JSON")
    level, depth = [schema], 0
    while level:
        inside = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level, depth = [value for each in inside if isinstance(each, list) for value in each], depth + 1
        if level and depth > DEEPEST:
            raise UserError(f"structured_outputs: json is nested more than {DEEPEST} deep: write a flatter schema")


COLDEST = 1e-5  # a lower temperature is greedy, as in vLLM
MOST_TOKENS = 2**31 - 1
MOST_LOGPROBS = 20

StopText = Annotated[Text, Meta(min_length=1, max_length=1000)]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="between -2 and 2")]
Bias = Annotated[float, Meta(ge=-1e6, le=1e6)]
TokenId = Annotated[int, Meta(ge=0, le=MOST_TOKENS, description="a token id, 0 or more")]


@dataclass(frozen=True)
class SamplingParams:
    """How a request is sampled: all that shapes p. Raises UserError, naming the field, for a value out of range."""

    # at 0 p is one-hot at the largest logit
    temperature: Annotated[
        float,
        Meta(ge=0, le=1000, description="0 (greedy) or more, up to 1000"),
        Flag("Sampling temperature; 0 is greedy.  [default: 0]", "T"),
    ] = 0.0
    top_k: Annotated[
        int,
        Meta(ge=0, le=MOST_TOKENS, description=f"0 (off) or more, up to {MOST_TOKENS}"),
        Flag("Keep the K likeliest tokens; 0 keeps all.  [default: 0]", "K"),
    ] = 0
    top_p: Annotated[
        float,
        Meta(gt=0, le=1, description="above 0 and at most 1"),
        Flag("Keep the likeliest tokens whose sum reaches P.  [default: 1]", "P"),
    ] = 1.0
    min_p: Annotated[
        float,
        Meta(ge=0, lt=1, description="at least 0 and below 1"),
        Flag("Drop tokens below P times the largest probability.  [default: 0]", "P"),
    ] = 0.0
    # divides (or multiplies) their logits
    repetition_penalty: Annotated[
        float,
        Meta(ge=1e-6, le=1e12, description="between 1e-6 and 1e12"),
        Flag("Penalty on tokens in the prompt or output; 1 is off.  [default: 1]", "R"),
    ] = 1.0
    # subtracted from their logits
    presence_penalty: Annotated[Penalty, Flag("Penalty on tokens in the output; 0 is off.  [default: 0]", "R")] = 0.0
    frequency_penalty: Annotated[
        Penalty, Flag("Penalty for each time a token is in the output; 0 is off.  [default: 0]", "R")
    ] = 0.0
    # added to the logits of these token ids
    logit_bias: Annotated[
        Mapping[TokenId, Bias],
        Meta(max_length=10_000, description="token ids (0 and up) with numbers between -1000000 and 1000000"),
        IDS,
    ] = field(default_factory=dict)
    seed: Annotated[Seed, Flag("Seed of every coin.  [default: 0]", "N")] = 0
    max_tokens: Annotated[
        int,
        Meta(ge=1, le=MOST_TOKENS, description=f"1 or more, up to {MOST_TOKENS}"),
        Flag("Maximum output tokens per request.  [default: 128]", "N"),
    ] = 128
    # it is not part of the output
    stop: Annotated[
        tuple[StopText, ...],
        Meta(max_length=64, description="a non-empty string or a list of them, at most 64 of 1000 characters"),
        TEXT,
        Flag("End the output at this text; repeatable.", "TEXT"),
    ] = ()
    ignore_eos: Annotated[bool, Flag("Continue past the end-of-sequence token.", negated=False)] = False
    min_tokens: Annotated[
        int,
        Meta(ge=0, le=MOST_TOKENS, description=f"0 (off) or more, up to {MOST_TOKENS}"),
        Flag("Minimum output tokens; EOS and stop tokens are masked until then.  [default: 0]", "N"),
    ] = 0
    # None for none
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_LOGPROBS, description=f"between 0 and {MOST_LOGPROBS}")] | None,
        Meta(description=f"between 0 and {MOST_LOGPROBS}, or null for none"),
        Flag(
            "Record the log-probabilities of each output token and of the N likeliest tokens, before sampling "
            "parameters.",
            "N",
        ),
    ] = None
    # also under ignore_eos
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Meta(max_length=64, description="a list of at most 64 token ids (0 and up)"),
        IDS,
        Flag("End the output at this token; repeatable.", "ID", name="--stop-token-id"),
    ] = ()
    # the form that the output must have
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="an object with one of json, regex, choice, grammar and json_object"),
        TEXT,
    ] = None
    # those of the above that were given and are not told (privacy.py); nobody asks for it
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_dict(self.structured_outputs))
        values = {name: getattr(self, name) for name in PARAM_TYPES}
        values = {n: float(value) if isinstance(value, float) else value for n, value in values.items()}  # or numpy's
        try:  # all at once: a capture may have very many
            vars(self).update(msgspec.structs.asdict(msgspec.convert(values, _ALL, str_keys=True)))
        except (ValueError, RecursionError):
            for name, kind in PARAM_TYPES.items():  # says which is wrong
                object.__setattr__(self, name, checked(values[name], kind, name))
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        """True at temperature 0, and below COLDEST, where logits divided by the temperature could overflow."""
        return self.temperature < COLDEST

    def has(self, name: str) -> bool:
        """Whether a parameter that may be left out was given."""
        return bool(getattr(self, name)) or name in self.left_out

    def kept(self, level: Privacy) -> SamplingParams:
        """The parameters that are kept at a privacy level: `left_out` names the rest."""
        gone = {name: getattr(_DEFAULT, name) for name in withheld_at(level) if getattr(self, name)}
        return dataclasses.replace(self, left_out=tuple(sorted((*self.left_out, *gone))), **gone) if gone else self

    @property
    def is_known(self) -> bool:
        """Whether all is told that is no text and no token id: not where only a request's own span came."""
        return not {*self.left_out} - WITHHELD

    @property
    def heeds_eos(self) -> bool:
        """Whether the end-of-sequence token ends the output: under a form it comes where that is complete alone."""
        return not self.ignore_eos or self.has("structured_outputs")

    @property
    def limited(self) -> bool:
        return self.min_tokens > 0 or self.has("structured_outputs")

    @property
    def moved(self) -> bool:
        """Whether p is not the softmax of the model's own logits over the temperature, but for min-p, top-k, top-p."""
        return self.penalised or self.has("logit_bias") or self.limited

    @property
    def plain(self) -> bool:
        """Whether p is the softmax of the model's own logits over the temperature."""
        return not self.moved and not self.top_k and self.top_p == 1 and not self.min_p

    @property
    def penalised(self) -> bool:
        """True where p depends on the tokens before it beyond the model itself."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["logit_bias"] = {str(token): value for token, value in self.logit_bias.items()}
        values["stop"], values["stop_token_ids"] = list(self.stop), list(self.stop_token_ids)
        form = self.structured_outputs
        values["structured_outputs"] = None if form is None else form.to_dict()
        if left_out := values.pop("left_out"):
            values["left_out"] = list(left_out)
        return values

    def told(self) -> dict[str, Any]:
        """As `to_dict`, with None for what is not told."""
        return self.to_dict() | dict.fromkeys(self.left_out)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SamplingParams:
        """The object that `to_dict` described. Unknown names raise UserError."""
        unknown = set(values) - PARAM_NAMES
        if unknown:
            name = short(sorted(unknown)[0])
            raise UserError(f"unknown sampling parameter {name}: use {', '.join(sorted(PARAM_NAMES))}")
        return SamplingParams(**values)


PARAM_NAMES = frozenset(f.name for f in dataclasses.fields(SamplingParams)) - {"left_out"}
PARAM_TYPES = field_types(SamplingParams)
_ALL = msgspec.defstruct("SamplingParams", list(PARAM_TYPES.items()))


def withheld_at(level: Privacy) -> list[str]:
    return [name for name, mark in withheld(SamplingParams).items() if mark is not None and mark.level <= level]


WITHHELD = frozenset(name for name, mark in withheld(SamplingParams).items() if mark is not None)
_DEFAULT = SamplingParams()


def kept_params(values: Mapping[str, Any], level: Privacy) -> Mapping[str, Any]:
    """A run's default parameters as kept at a privacy level, from `to_dict`; another engine may report none."""
    return SamplingParams(**values).kept(level).to_dict() if values else values


FORM = "structured_outputs"  # a label where the form cannot be told in SamplingParams
UNREAD = "params"  # the parameters themselves could not be put into SamplingParams
LIMITING = ("bad_words", "allowed_token_ids", "logits_processors", "thinking_token_budget")
# Names of such labels. What each allows is not in the capture in a form that can be computed again.
LIMITS = (*LIMITING, "min_tokens", FORM, "logit_bias", UNREAD)  # min_tokens in captures of before
RELAXED = "penalties"  # see EngineWays.relaxes_penalties
NO_SEED = ("seed", "none")  # a label of an engine that drew one itself


def unknown_limits(params: SamplingParams, labels: Mapping[str, str]) -> tuple[str, ...]:
    """The limits of a request of another engine; a form is always one: each engine makes a grammar of its own of it."""
    form = params.structured_outputs is not None
    untold = untold_limits(params)
    return tuple(name for name in LIMITS if name in labels or name in untold or (form and name == FORM))


def untold_limits(params: SamplingParams) -> tuple[str, ...]:
    return tuple(name for name in LIMITS if name in params.left_out)


def kept_labels(labels: Mapping[str, str], _: Privacy) -> Mapping[str, str]:
    """Without what people wrote: only that a limit was there, and that there was no seed, is kept."""
    limits = {name: LEFT_OUT for name in LIMITS if name in labels}
    return limits | dict(pair for pair in labels.items() if pair == NO_SEED)


@dataclass(frozen=True)
class EngineWays:
    """What an engine does in its own way, by design. The defaults are our own engine's."""

    drafter_takes: tuple[str, ...] | None = None  # which of a request's parameters its drafter is given; None: all
    raw_is_masked: bool = False  # raw p is that after the form's mask: the logits are masked before its sampler runs
    relaxes_penalties: bool = False  # drafted rows are penalised for tokens that were committed some steps ago
    looks_up_in_all: bool = False  # its n-gram drafter searches the texts of all requests, not only the request's own
    filler: int | None = None  # the token with which that drafter fills a tree; None where it or another does not
    sends_empty: bool = False  # a request for several outputs is preceded by one of 0 tokens, which fills the cache

    def drafter_params(self, params: SamplingParams) -> SamplingParams:
        names = self.drafter_takes
        return params if names is None else SamplingParams(**{name: getattr(params, name) for name in names})


WAYS = {
    "vllm": EngineWays(drafter_takes=("temperature",), raw_is_masked=True),
    "sglang": EngineWays(
        drafter_takes=("temperature",), relaxes_penalties=True, looks_up_in_all=True, filler=0, sends_empty=True
    ),
}


def ways_of(versions: Mapping[str, str], drafter: str) -> EngineWays:
    """The ways of the engine that made a run, with this drafter. `versions`: the run's."""
    ways = next((ways for name, ways in WAYS.items() if name in versions), EngineWays())
    return ways if drafter == "ngram" else replace(ways, filler=None)
