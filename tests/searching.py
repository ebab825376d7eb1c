"""Whether what left a process holds a request's tokens: all numbers of it in their order, however they are wrapped."""

import json
from pathlib import Path

WINDOW = 4  # tokens in a row: fewer may be there by chance


def of_file(path):
    """The rows of numbers of a capture."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return list(rows(lines))


def rows(value):
    """Every list of numbers in a value, in OTLP's JSON, and in JSON inside a string."""
    if isinstance(value, str) and value[:1] in "{[":
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, dict):
        if value.keys() == {"values"}:
            value = [each.get("intValue", each) if isinstance(each, dict) else each for each in value["values"]]
        else:
            yield [key for key in value if str(key).isdigit()]
            value = list(value.values())
    if isinstance(value, list | tuple):
        yield [int(each) for each in value if isinstance(each, int) or (isinstance(each, str) and each.isdigit())]
        for each in value:
            yield from rows(each)


def tells(found, tokens):
    """Whether some of these rows hold a stretch of the tokens."""
    stretches = {tuple(tokens[at : at + WINDOW]) for at in range(len(tokens) - WINDOW + 1)}
    stretches = {stretch for stretch in stretches if len(set(stretch)) > 1}
    assert stretches, "the tokens are all alike: choose others"
    return any(tuple(row[at : at + WINDOW]) in stretches for row in found for at in range(len(row) - WINDOW + 1))
