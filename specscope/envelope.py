"""The one layout of all JSON that a command prints or writes. docs/json.md describes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# By verb, the version of its JSON, where it is no longer 1
RAISED: Mapping[str, int] = {"diagnose": 2, "report": 3, "compare": 3}
NOTHING: Mapping[str, Any] = {}


def envelope(
    verb: str, values: Mapping[str, Any], *, source: Iterable[str], code: int = 0, warnings: Iterable[str] = ()
) -> dict[str, Any]:
    """What a verb found, under the words that all verbs share.

    `source`: the files or URLs that it looked at; `code`: what the command exits with; `warnings`: what is missing.
    """
    head = {"schema": f"specscope.{verb}/{RAISED.get(verb, 1)}", "source": list(source)}
    return _with_head(head, values, code, warnings)


def of_capture(
    source: str, values: Mapping[str, Any], *, code: int = 0, warnings: Iterable[str] = ()
) -> dict[str, Any]:
    """What a verb found in one capture, under the same words."""
    return _with_head({"source": source}, values, code, warnings)


def of_captures(
    verb: str,
    captures: Sequence[Mapping[str, Any]],
    code: int,
    values: Mapping[str, Any] = NOTHING,
    warnings: Iterable[str] = (),
) -> dict[str, Any]:
    """What a verb found in each of some captures (`of_capture`), and what it says and warns of for all together."""
    several = len(captures) > 1
    told = [
        f"{capture['source']}: {warning}" if several else warning
        for capture in captures
        for warning in capture["warnings"]
    ]
    source = [capture["source"] for capture in captures]
    return envelope(verb, {**values, "captures": list(captures)}, source=source, code=code, warnings=[*warnings, *told])


def _with_head(
    head: Mapping[str, Any], values: Mapping[str, Any], code: int, warnings: Iterable[str]
) -> dict[str, Any]:
    whole = {**head, "exit": int(code), "warnings": list(warnings)}
    return {**whole, **{name: value for name, value in values.items() if name not in whole}}
