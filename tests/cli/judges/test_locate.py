"""`specscope diagnose --only locate`: what is refused before a model is loaded. It finds: tests/measure/locate/."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run_here

EAGLE = str(Path(__file__).parents[3] / "traces" / "eagle.jsonl")
REFUSED = {
    "no such request": ([f"{EAGLE}#r9@1"], "there is no request 'r9'"),
    "no such step": ([f"{EAGLE}#r1@9999"], "has no step 9999"),
    "no such node": ([f"{EAGLE}#r1@7/999"], "there is no node 999 in r1@7"),
    "not a step": ([f"{EAGLE}#r1@x"], "write a step number after @"),
    "no such stage": ([EAGLE, "--stage", "softmax"], "softmax"),
    "no such file": (["./none.jsonl"], "none.jsonl"),
    "no such model": ([EAGLE, "--target", "./none"], "no model at ./none"),
    "no such branch": ([EAGLE, "--branch", "7"], "the run has no such branch"),
    "a screen as JSON": ([EAGLE, "--screen", "--json"], "leave out --json"),
    "two captures": ([EAGLE, f"{EAGLE}#r1"], "--only locate takes one capture"),
    "no models": ([EAGLE, "--no-audit"], "--only locate runs only this stage: leave out --no-audit"),
    "a screen without a terminal": ([EAGLE, "--screen"], "the screen needs a terminal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_line(name):
    words, says = REFUSED[name]
    code, out, err = run_here(["diagnose", "--only", "locate", *words])
    assert code == 2
    assert (out == "") is ("--json" not in words)
    assert says in err
    assert "Traceback" not in err


def test_a_refusal_is_json_too():
    code, out, _ = run_here(["diagnose", "--only", "locate", f"{EAGLE}#r9@1", "--json"])
    found = json.loads(out)
    assert (code, found["exit"], found["schema"]) == (2, 2, "specscope.diagnose/2")
    assert "there is no request 'r9'" in found["captures"][0]["error"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([f"{EAGLE}#r1@7"], f"{EAGLE}#r1@7 names a place: give the whole capture or add --only locate"),
        ([EAGLE, "--stage", "draws"], "--stage and --screen need --only locate"),
        ([EAGLE, "--only", "audit", "--screen"], "--stage and --screen need --only locate"),
        ([EAGLE, "--only", "audit", "--no-known"], "--only audit runs only this stage: leave out --no-known"),
        ([EAGLE, "--only", "verify"], "'audit', 'locate'"),
    ],
)
def test_what_belongs_to_this_stage_alone_is_refused_elsewhere(words, says):
    code, out, err = run_here(["diagnose", *words])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
