"""tests/guarantees.md: each line names tests, and each of them is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = [
    line
    for line in (ROOT / "tests" / "guarantees.md").read_text("utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("| promised", "|---"))
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip()[:50])
def test_what_is_promised_is_tested(line):
    _, promise, held, _ = line.split("|")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", held)
    assert promise.strip()
    assert named, "no test is named"
    assert held.strip() == ", ".join(f"`{path}::{name}`" for path, name in named)
    for path, name in named:
        found = ast.walk(ast.parse((ROOT / path).read_text("utf-8")))
        assert any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in found), (
            f"{path} has no {name}"
        )
