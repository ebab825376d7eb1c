"""SamplingParams: what a request asks of the sampler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specscope.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How a request is sampled. All of it shapes the distribution p that verification uses.

    Raises UserError, naming the field, when a value is out of range.
    """

    temperature: float = 0.0  # 0 is greedy: p is one-hot at the largest logit
    top_k: int = 0  # keep the k largest; 0 keeps all
    top_p: float = 1.0  # keep the smallest set whose mass reaches top_p; in (0, 1]
    min_p: float = 0.0  # drop tokens below min_p times the largest probability; in [0, 1)
    repetition_penalty: float = 1.0  # divides (or multiplies) logits of tokens in prompt and output
    presence_penalty: float = 0.0  # subtracted once from logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once for each time a token is in the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these token ids
    seed: int = 0  # every coin of the request follows from it
    max_tokens: int = 128  # output tokens at most
    stop: tuple[str, ...] = ()  # strings that end the output; not part of it
    ignore_eos: bool = False  # go on past the end-of-sequence token

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        try:
            bias = {int(token): float(value) for token, value in self.logit_bias.items()}
        except (TypeError, ValueError, AttributeError):
            raise UserError("logit_bias must map token ids to numbers") from None
        object.__setattr__(self, "logit_bias", bias)
        for name, kind in _KINDS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), kind))
        self._check_ranges()

    def _check_ranges(self) -> None:
        rules = [
            (self.temperature >= 0, "temperature", "0 (greedy) or more"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (0 <= self.min_p < 1, "min_p", "at least 0 and below 1"),
            (self.repetition_penalty > 0, "repetition_penalty", "above 0"),
            (abs(self.presence_penalty) <= 2, "presence_penalty", "between -2 and 2"),
            (abs(self.frequency_penalty) <= 2, "frequency_penalty", "between -2 and 2"),
            (self.max_tokens >= 1, "max_tokens", "1 or more"),
            (0 <= self.seed < 2**63, "seed", "between 0 and 2^63 - 1"),
        ]
        for good, name, want in rules:
            if not good:
                raise UserError(f"{name} must be {want}, not {getattr(self, name)}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError("stop must be a non-empty string or a list of them")
        if not all(math.isfinite(value) and token >= 0 for token, value in self.logit_bias.items()):
            raise UserError("logit_bias must map token ids (0 and up) to finite numbers")

    @property
    def greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """True where p depends on the tokens before it beyond the model itself."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back to an equal object."""
        values = dataclasses.asdict(self)
        values["logit_bias"] = {str(token): value for token, value in self.logit_bias.items()}
        values["stop"] = list(self.stop)
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SamplingParams:
        """The object that `to_dict` described. Unknown names raise UserError."""
        unknown = set(values) - PARAM_NAMES
        if unknown:
            raise UserError(
                f"unknown sampling parameter {sorted(unknown)[0]!r}; known: {', '.join(sorted(PARAM_NAMES))}"
            )
        return SamplingParams(**values)


PARAM_NAMES = frozenset(f.name for f in dataclasses.fields(SamplingParams))
_KINDS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
    "ignore_eos": bool,
}


def _number(name: str, value: object, kind: type) -> float | int | bool:
    """`value` as `kind`, or a UserError that names the field."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise UserError(f"{name} must be true or false, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name} must be a number, not {value!r}")
    if kind is int and value != int(value):
        raise UserError(f"{name} must be a whole number, not {value!r}")
    return int(value) if kind is int else float(value)
