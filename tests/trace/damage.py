"""Damage for captures, by a seeded generator: bytes, JSON values, arrays, ids, whole spans."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[2] / "traces"
SAMPLES = ("planted", "sampled", "eagle", "ngram")
STEPS = 5  # of a sample that are kept, besides the one in which a request ends
DEEP = "@deep@"  # stands for a value nested so deep that no Python list could be made of it
DEPTH = 20_000
ODD_TEXT = ["", "\x1b[2J\x1b]0;gone\x07", "a\nb\r\tc", "\u202eabc\u2066", "x" * 100_000, "\\x", "\\xzz", "\\"]
ODD: list[Any] = [None, True, False, 0, 1, -1, -5, 2, 7, 255, 2**31 - 1, 2**31, 2**40, 2**53, 2**62, 2**63, 10**30]
ODD += [0.5, -0.5, 1.5, 1e300, -1e300, [], {}, [[]], [1, 2], {"a": 1}, "1", "NaN", "Infinity", "abc", DEEP, *ODD_TEXT]


def small(name: str) -> list[dict[str, Any]]:
    """The lines of a sample capture, as JSON values: a few steps, and one in which a request ends."""
    lines = [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]
    spans = [span for line in lines for span in spans_of(line)]
    ends = min(
        value_of(span, "specscope.step") for span in spans if span["name"].startswith(("chat", "text_completion"))
    )
    kept = {step: step for step in range(STEPS)} | {ends: min(ends, STEPS)}
    chosen = [span for span in spans if value_of(span, "specscope.step") in kept]
    for span in chosen:
        set_value(span, "specscope.step", kept[value_of(span, "specscope.step")])
    empty = json.dumps(lines[0])
    made = [json.loads(empty)]
    for at in range(0, len(chosen), 12):
        made.append(json.loads(empty))
        made[-1]["resourceSpans"][0]["scopeSpans"][0]["spans"] = chosen[at : at + 12]
    return made


WRONG = ["NaN", "Infinity", "-Infinity", -0.25, 1.25]  # numbers of the right type, as OTLP JSON has them
NOTES = ("specscope.parents", "specscope.method", "specscope.form", "specscope.logprobs")  # JSON in JSON


def with_wrong_numbers(lines: list[dict[str, Any]], seed: int, share: float = 0.05) -> bytes:
    """The lines, where some of the numbers in decode steps are such: nothing is damaged, and all of it is evidence."""
    chance = random.Random(seed)

    def spoiled(value: Any) -> Any:
        if isinstance(value, list):
            return [spoiled(inner) for inner in value]
        if isinstance(value, dict):
            return {name: spoiled(inner) for name, inner in value.items()}
        return chance.choice(WRONG) if isinstance(value, float) and chance.random() < share else value

    lines = json.loads(json.dumps(lines))
    for span in (span for line in lines for span in spans_of(line) if span["name"] == "decode_step"):
        for pair in span["attributes"]:
            if pair["key"] in NOTES:
                pair["value"]["stringValue"] = json.dumps(spoiled(json.loads(pair["value"]["stringValue"])))
            else:
                pair["value"] = spoiled(pair["value"])
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def spans_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The spans of a line."""
    return [span for part in line["resourceSpans"] for scope in part["scopeSpans"] for span in scope["spans"]]


def value_of(span: dict[str, Any], key: str) -> int:
    """An integer attribute; -1 where there is none."""
    return next((int(p["value"]["intValue"]) for p in span["attributes"] if p["key"] == key), -1)


def set_value(span: dict[str, Any], key: str, value: int) -> None:
    """Change an integer attribute."""
    for pair in span["attributes"]:
        if pair["key"] == key:
            pair["value"] = {"intValue": str(value)}


def damaged(lines: list[dict[str, Any]], seed: int) -> bytes:
    """The lines with something done to them."""
    chance = random.Random(seed)
    lines = json.loads(json.dumps(lines))
    for _ in range(chance.choice([1, 1, 1, 2, 4, 12])):
        chance.choice([_attribute, _attribute, _attribute, _array, _array, _parents, _node, _node, _spans, _ids])(
            lines, chance
        )
    if chance.random() < 0.1:
        chance.shuffle(lines)
    deep = "[" * DEPTH + "]" * DEPTH if chance.random() < 0.5 else '{"a":' * DEPTH + "1" + "}" * DEPTH
    body = b"".join(json.dumps(line).replace(f'"{DEEP}"', deep).encode() + b"\n" for line in lines)
    return _bytes(body, chance) if chance.random() < 0.15 else body


def _any_span(lines: list[dict[str, Any]], chance: random.Random) -> dict[str, Any] | None:
    spans = [
        span
        for line in lines
        for part in _list(_get(line, "resourceSpans"))
        for scope in _list(_get(part, "scopeSpans"))
        for span in _list(_get(scope, "spans"))
        if isinstance(span, dict)
    ]
    return chance.choice(spans) if spans else None


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pairs(lines: list[dict[str, Any]], chance: random.Random) -> list[Any]:
    """The attributes of a span, or of a resource."""
    span = _any_span(lines, chance)
    if chance.random() < 0.05:
        parts = _list(_get(chance.choice(lines), "resourceSpans"))
        return _list(_get(_get(parts[0], "resource"), "attributes")) if parts else []
    return _list(_get(span, "attributes"))


def _attribute(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """An attribute gets another value, or goes."""
    pairs = [pair for pair in _pairs(lines, chance) if isinstance(pair, dict)]
    if not pairs:
        return
    pair = chance.choice(pairs)
    if chance.random() < 0.15:
        pair["key"] = chance.choice([other.get("key") for other in pairs] + ["", "specscope.tree.parent"])
    elif chance.random() < 0.1:
        pairs.remove(pair)
    else:
        pair["value"] = _wrapped(chance.choice(ODD), chance)


def _wrapped(value: Any, chance: random.Random) -> Any:
    """A value as OTLP JSON has it; sometimes not quite."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value) if chance.random() < 0.8 else value}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {chance.choice(["stringValue", "stringValue", "doubleValue", "intValue"]): value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_wrapped(item, chance) for item in value]}}
    return chance.choice([None, {}, {"kvlistValue": {"values": value}}, value])


def _array(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """An array becomes shorter or longer, or one of its values another."""
    arrays = [
        values
        for pair in _pairs(lines, chance)
        if (values := _list(_get(_get(_get(pair, "value"), "arrayValue"), "values")))
    ]
    if not arrays:
        return
    values = chance.choice(arrays)
    at = chance.randrange(len(values))
    match chance.randrange(5):
        case 0:
            del values[at]
        case 1:
            values.insert(at, values[at])
        case 2:
            values *= 300
        case _:
            values[at] = _wrapped(chance.choice(ODD), chance)


def _parents(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """Cycles, nodes that are their own parents, parents that are none."""
    for _ in range(20):
        for pair in _pairs(lines, chance):
            if _get(pair, "key") in ("specscope.tree.parent", "specscope.verdict.path"):
                values = _list(_get(_get(pair["value"], "arrayValue"), "values"))
                n = len(values)
                changed = chance.choice(
                    [
                        [(i + 1) % n for i in range(n)] if n else [],
                        list(range(n)),
                        [-5] * n,
                        [n + i for i in range(n)],
                        [-1] * n,
                        list(range(-1, n - 1)),
                        [chance.randrange(-2, n + 1) for _ in range(n)],
                    ]
                )
                pair["value"] = {"arrayValue": {"values": [{"intValue": str(value)} for value in changed]}}
                return


def _node(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """Any value of the JSON, wherever it lies."""
    at: Any = lines
    key: Any = None
    above: Any = None
    while isinstance(at, dict | list) and at and (above is None or chance.random() < 0.93):
        above, key = at, chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
        at = at[key]
    if above is None or above is lines:
        return
    match chance.randrange(3):
        case 0:
            del above[key]
        case 1 if isinstance(above, list):
            above.insert(key, at)
        case _:
            above[key] = chance.choice(ODD)


def _spans(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """Spans go, come twice, or change places."""
    line = chance.choice(lines)
    parts = _list(_get(line, "resourceSpans"))
    spans = [spans for part in parts for scope in _list(_get(part, "scopeSpans")) if (spans := _get(scope, "spans"))]
    if not spans or not isinstance(spans[0], list):
        return
    at = chance.randrange(len(spans[0]))
    match chance.randrange(3):
        case 0:
            del spans[0][at]
        case 1:
            spans[0] *= 2
        case _:
            chance.shuffle(spans[0])


def _ids(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """A span tells of another request, or of another step."""
    span = _any_span(lines, chance)
    for pair in _list(_get(span, "attributes")):
        if _get(pair, "key") == "specscope.request.id" and chance.random() < 0.7:
            pair["value"] = {"stringValue": chance.choice(["r0", "r1", "r2", "nobody", "\x1b[31mr0", "r0\nr1"])}
        if _get(pair, "key") == "specscope.step" and chance.random() < 0.5:
            pair["value"] = {"intValue": str(chance.choice([0, 1, 2, 3, 900, 2**40, 2**52, 2**62, -1]))}


def _bytes(body: bytes, chance: random.Random) -> bytes:
    """Bytes go, change, or come from elsewhere."""
    out = bytearray(body)
    for _ in range(chance.choice([1, 3, 30])):
        at = chance.randrange(len(out))
        size = chance.choice([1, 1, 10, 500])
        match chance.randrange(4):
            case 0:
                out[at] = chance.randrange(256)
            case 1:
                del out[at : at + size]
            case 2:
                out[at:at] = chance.randbytes(size)
            case _:
                del out[at:]
                out += b"\n" if chance.random() < 0.5 else b""
        if not out:
            return b""
    return bytes(out)
