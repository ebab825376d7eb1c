"""`specscope diagnose`: its text, its JSON, its exit codes, and what it says where models are missing."""

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from specscope.cli import captures
from specscope.cli.main import cli
from specscope.errors import UserError
from tests.faults.settings import Setting, record

TRACES = Path(__file__).parents[3] / "traces"


def run(*arguments):
    return CliRunner().invoke(cli, ["diagnose", *map(str, arguments)])


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A capture of a small model."""
    return record(Setting("ngram", requests=2, tokens=30), tmp_path_factory.mktemp("own") / "run.jsonl").read_text()


def test_the_planted_bug_of_the_readme_is_named():
    result = run(TRACES / "planted.jsonl", "--no-audit")
    assert result.exit_code == 1
    assert "1. the drafts are shifted in position" in result.output
    assert f"specscope open '{TRACES / 'planted.jsonl'}#r0@" in result.output
    assert "! the audit was skipped: you gave --no-audit" in result.output
    assert re.search(r"recorded by specscope \S+, torch \S+, .*; judged by specscope \d", result.output)


def test_a_healthy_capture_has_no_fault():
    for name in ("ngram", "eagle", "sampled"):
        result = run(TRACES / f"{name}.jsonl", "--no-audit")
        assert result.exit_code == 0, result.output
        assert "No fault found by verify over" in result.output


def test_a_model_that_is_not_at_hand_is_said(tmp_path):
    text = (TRACES / "ngram.jsonl").read_text()
    other = tmp_path / "other.jsonl"
    other.write_text(text.replace("SmolLM2-135M-Instruct", "nobody/has-this"))
    result = run(other)
    assert result.exit_code == 2, result.output  # what was asked for could not be judged
    assert "not judged: audit: " in result.output
    assert "nobody/has-this" in result.output


def test_a_model_that_was_named_and_is_not_there_is_refused():
    result = run(TRACES / "ngram.jsonl", "--target", "/no/such/model")
    assert isinstance(result.exception, UserError)


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
    result = run(file, "--json", "--sample", 2)
    (found,) = json.loads(result.stdout)["captures"]
    assert result.exit_code == 2
    walked = ["locate"] if name == "drafter" else []  # of a drafter that is not ours, the target's operations
    assert found["looked_at"] == ["capture", "verify", "audit", *walked]
    assert found["left_out"] == [f"audit: {says}"]


def test_progress_in_a_pipe_is_a_line_every_few_seconds(capsys, monkeypatch):
    monkeypatch.setattr(captures, "EVERY", 0.05)
    with captures.progress_bar() as progress:
        progress("auditing the target", 3, 120)
        time.sleep(0.2)
        progress("looking at the verdict", 0, 0)
        time.sleep(0.2)
    ended = capsys.readouterr().err
    assert "0 s: auditing the target, 3 of 120\n" in ended
    assert ended.endswith("0 s: looking at the verdict\n")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
