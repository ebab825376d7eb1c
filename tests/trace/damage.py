"""Damage for captures, by a seeded generator: values of attributes, wrong numbers."""

import json
import random
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[2] / "traces"
SAMPLES = ("planted", "sampled", "eagle", "ngram")
STEPS = 5  # of a sample that are kept, besides the one in which a request ends
DEPTH = 20_000  # of values nested so deep that no Python list could be made of them
ODD: list[Any] = [{"intValue": str(value)} for value in (0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**40, 2**62)]
ODD += [{"doubleValue": value} for value in (0.5, -0.5, 1.5, 1e300, "NaN")] + [{"stringValue": "\x1b[2J"}, {}]


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
    """The lines with some attributes of spans gone, changed or another span's. Of bytes: tests/test_fuzzing.py."""
    chance = random.Random(seed)
    lines = json.loads(json.dumps(lines))
    spans = [span for line in lines for span in spans_of(line)]
    for _ in range(chance.choice([1, 4, 12])):
        span = chance.choice(spans)
        pair = chance.choice(span["attributes"])
        values = pair["value"].get("arrayValue", {}).get("values")
        match chance.randrange(4):
            case 0:
                span["attributes"].remove(pair)
            case 1 if values:
                chance.shuffle(values)
            case 2 if values:
                values[chance.randrange(len(values))] = chance.choice(ODD)
            case _:
                others = [each for one in spans for each in one["attributes"] if each["key"] == pair["key"]]
                pair["value"] = chance.choice([chance.choice(others)["value"], *ODD[:2]])
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
