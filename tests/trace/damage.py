"""Damage for captures, by a seeded generator: bytes, JSON values, arrays, ids, whole spans."""

import json
import random
from collections.abc import Iterator
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
    """The lines with something done to them; of bytes that change, tests/test_fuzzing.py has more."""
    chance = random.Random(seed)
    lines = json.loads(json.dumps(lines))
    for _ in range(chance.choice([1, 1, 1, 2, 4, 12])):
        chance.choice([_value, _value, _value, _parents, _ids])(lines, chance)
    if chance.random() < 0.1:
        chance.shuffle(lines)
    deep = "[" * DEPTH + "]" * DEPTH if chance.random() < 0.5 else '{"a":' * DEPTH + "1" + "}" * DEPTH
    body = b"".join(json.dumps(line).replace(f'"{DEEP}"', deep).encode() + b"\n" for line in lines)
    return body[: chance.randrange(len(body))] if chance.random() < 0.05 else body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside of a value, as (what holds it, under which key)."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


# Where damage is done most: to an attribute, its array, its name, to spans; None: anywhere
KEYS = ("value", "value", "values", "values", "key", "spans", "attributes", "resource", None, None, None)


def _value(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """A value goes, comes often, changes places, or becomes another one."""
    wanted, places = chance.choice(KEYS), list(_places(lines))
    holder, key = chance.choice([place for place in places if wanted in (None, place[1])] or places or [(lines, 0)])
    old, odd = holder[key], chance.choice(ODD)
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(old, list):
            old *= chance.choice([2, 300])
        case 2 if isinstance(old, list):
            chance.shuffle(old)
        case 3 | 4 if isinstance(old, list) and old:
            at = chance.randrange(len(old))
            old[at : at + 1] = chance.choice([[], [old[at]] * 2, [_wrapped(odd, chance)]])
        case _ if wanted == "key":
            holder[key] = chance.choice(["", "specscope.tree.parent", "specscope.step", "specscope.verdict.p"])
        case _:
            holder[key] = _wrapped(odd, chance) if wanted == "value" else odd


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


def _named(lines: list[dict[str, Any]], *names: str) -> list[Any]:
    """The attributes of these names."""
    return [holder for holder, key in _places(lines) if key == "key" and str(holder[key]) in names]


def _parents(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """Cycles, nodes that are their own parents, parents that are none."""
    if found := _named(lines, "specscope.tree.parent", "specscope.verdict.path"):
        pair = chance.choice(found)
        n = str(pair.get("value")).count("intValue")
        odd = [[(i + 1) % max(n, 1) for i in range(n)], list(range(n)), [-5] * n, [n + i for i in range(n)], [-1] * n]
        odd += [list(range(-1, n - 1)), [chance.randrange(-2, n + 1) for _ in range(n)]]
        pair["value"] = {"arrayValue": {"values": [{"intValue": str(value)} for value in chance.choice(odd)]}}


def _ids(lines: list[dict[str, Any]], chance: random.Random) -> None:
    """A span tells of another request, or of another step."""
    name = chance.choice(["specscope.request.id", "specscope.step"])
    if found := _named(lines, name):
        pair = chance.choice(found)
        if name == "specscope.step":
            pair["value"] = {"intValue": str(chance.choice([0, 1, 2, 3, 900, 2**40, 2**52, 2**62, -1]))}
        else:
            pair["value"] = {"stringValue": chance.choice(["r0", "r1", "r2", "nobody", "\x1b[31mr0", "r0\nr1"])}
