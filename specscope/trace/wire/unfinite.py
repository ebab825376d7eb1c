"""JSON of evidence: numbers that JSON has no form for (NaN, Infinity) are texts, as protobuf's JSON has them.

An engine that went wrong may have computed them, so they are kept: written, read back, and judged by `verify`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

ROUNDING = 1e-3  # by which a sum of float32 probabilities may be above 1
Number = float | Literal["NaN", "Infinity", "-Infinity"]  # in JSON; numpy reads the texts as what they stand for
FEW, EACH = 32, 75  # values of an array that is not packed, and of each text: of at most 26 bytes
_NULL = b"null"  # what orjson writes for such a number; no evidence of ours holds another


def named(value: float) -> float | str:
    """A number as we write it in JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def sound(values: NDArray[Any]) -> NDArray[Any]:
    """The values that can be probabilities, NaN elsewhere: means and curves skip NaN, and `verify` reports it."""
    masked: NDArray[Any] = np.where((values >= 0) & (values <= 1 + ROUNDING), values, np.nan)
    return masked


def dump_numbers(values: Sequence[float]) -> bytes:
    """A JSON array."""
    text = orjson.dumps(values)
    return orjson.dumps(list(map(named, values))) if _NULL in text else text


def packed(values: Sequence[float]) -> Sequence[float] | list[str]:
    """An array, or JSON of some of it at a time: stores cut texts of over 2,048 bytes."""
    if len(values) <= FEW:
        return values
    return [dump_numbers(values[start : start + EACH]).decode() for start in range(0, len(values), EACH)]


def dump_notes(notes: Mapping[str, Any]) -> str:
    """A JSON object of arrays and plain values."""
    text = orjson.dumps(notes, default=np.ndarray.tolist, option=orjson.OPT_SERIALIZE_NUMPY)
    return (orjson.dumps(_all_named(notes)) if _NULL in text else text).decode()


def _all_named(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, np.ndarray):
        return _all_named(value.tolist())
    if isinstance(value, Mapping):
        return {name: _all_named(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_all_named(inner) for inner in value]
    return named(value) if isinstance(value, float) else value
