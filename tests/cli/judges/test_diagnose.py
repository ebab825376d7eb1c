"""`specscope diagnose`: its text, its JSON, its exit codes, and what it says where models are missing."""

import json
import re
import threading
from pathlib import Path

import pytest

from specscope.cli import captures
from tests.faults.settings import Setting, record
from tests.support.commands import run_here, specscope
from tests.support.samples import EAGLE, NGRAM, PLANTED, SAMPLED
from tests.waiting import until


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A capture of a small model."""
    return record(Setting("ngram", requests=2, tokens=30), tmp_path_factory.mktemp("own") / "run.jsonl").read_text()


def test_the_planted_bug_of_the_readme_is_named_and_healthy_captures_have_no_fault():
    code, out, _ = run_here(["diagnose", PLANTED, "--no-audit"])
    assert code == 1
    assert "1. the drafts are shifted in position" in out
    assert f"specscope open '{PLANTED}#r0@" in out
    assert "! the audit was skipped: you gave --no-audit" in out
    assert re.search(r"recorded by specscope \S+, torch \S+, .*; judged by specscope \d", out)
    for name in (NGRAM, EAGLE, SAMPLED):
        code, out, _ = run_here(["diagnose", name, "--no-audit"])
        assert (code, "No fault found by verify over" in out) == (0, True), out


def test_a_model_that_is_not_at_hand_is_said(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(Path(NGRAM).read_text().replace("SmolLM2-135M-Instruct", "nobody/has-this"))
    code, out, _ = run_here(["diagnose", str(other)])
    assert code == 2  # what was asked for could not be judged
    assert re.search("not judged: audit: .*nobody/has-this", out)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tree", "x", "The drafter's lookups were not judged: the capture's tree cannot be read ('x')."),
        ("tree", "", "The drafter's lookups were not judged: the capture's tree cannot be read ('')."),
        ("drafter", "x", "The drafter was not judged: there is no judge for the drafter x."),
    ],
)
def test_a_header_that_names_no_tree_or_drafter_of_ours_says_what_was_not_judged(own, tmp_path, name, value, says):
    file = tmp_path / "header.jsonl"
    file.write_text(re.sub(rf'("specscope\.run\.{name}","value":{{"stringValue":)"[^"]*"', rf'\1"{value}"', own))
    result = specscope("diagnose", file, "--json", "--sample", 2)
    (found,) = json.loads(result.stdout)["captures"]
    assert result.returncode == 2
    walked = ["locate"] if name == "drafter" else []  # of a drafter that is not ours, the target's operations
    assert found["looked_at"] == ["capture", "verify", "audit", *walked]
    assert found["left_out"] == [f"audit: {says}"]


def test_progress_in_a_pipe_is_a_line_every_few_seconds(monkeypatch):
    said = []

    def told(words):
        return lambda: any(line.endswith(f" s: {words}") for line in said)

    monkeypatch.setattr(captures, "EVERY", 0.01)
    monkeypatch.setattr("click.echo", lambda line, err: said.append(line))
    with captures.progress_bar() as progress:
        progress("auditing the target", 3, 120)
        until(told("auditing the target, 3 of 120"))
        progress("looking at the verdict", 0, 0)
        until(told("looking at the verdict"))
    until(lambda: not any("(lines)" in thread.name for thread in threading.enumerate()))
