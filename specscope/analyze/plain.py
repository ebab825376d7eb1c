"""Results as plain values, as JSON has them: the one `to_dict` that most of them need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from specscope.analyze.findings import Reference

PLAIN = (int, bool, type(None))


def plain(value: Any) -> Any:  # noqa: ANN401
    """A value as JSON has it: a record by its fields, a reference as `open` reads it, no infinity, valid text.

    What has a `to_dict` tells itself.
    """
    if type(value) in PLAIN:
        return value
    if type(value) is str:
        return valid(value)
    match value:
        case Reference():
            return str(value)
        case Enum():
            return value.value
        case Mapping():
            return {str(plain(key)): plain(item) for key, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
        case np.ndarray() | np.generic():
            return plain(value.tolist())
        case float():
            return value if math.isfinite(value) else None
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return fields(value) if dataclasses.is_dataclass(value) else value


def valid(text: str) -> str:
    """The text with lone surrogates replaced: JSON and HTML cannot hold them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def fields(value: Any, *left_out: str) -> dict[str, Any]:  # noqa: ANN401
    """A record's fields as plain values, by their names."""
    names = [field.name for field in dataclasses.fields(value) if field.name not in left_out]
    return {name: plain(getattr(value, name)) for name in names}
