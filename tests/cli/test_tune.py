"""`specscope tune`: text, JSON, costs from a file, and what it refuses."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from specscope.cli.main import cli
from specscope.errors import UserError
from specscope.lifetime import Lifetime
from specscope.plans.costs import CostPoint, Costs, about_run, write_costs
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.faults.models import HEAD, TARGET, story
from tests.faults.settings import Setting, record

TRACES = Path(__file__).parents[2] / "traces"
EAGLE = TRACES / "eagle.jsonl"


def run(*arguments):
    return CliRunner().invoke(cli, ["tune", *map(str, arguments)])


@pytest.fixture
def costs(tmp_path):
    """A file of costs for the sample capture."""
    told = read_capture(EAGLE).history.run
    point = CostPoint(1, 0.02, 0.0199, 0.0201)
    step = (dataclasses.replace(point, rows=2), CostPoint(32, 0.06, 0.059, 0.061))
    passes = (CostPoint(1, 0.002, 0.002, 0.002),)
    file = tmp_path / "costs.json"
    about = {**about_run(told), "cpu": "one", "context": "50"}
    write_costs(str(file), Costs(about, (point, *step), passes, passes))
    return file


def test_acceptance_alone_needs_no_costs():
    result = run(EAGLE, "--no-costs", "--nodes", 8, "--tree", "3")
    assert result.exit_code == 0, result.output
    assert "The best static tree of each size" in result.output
    assert "The best dynamic tree of each size" in result.output
    assert "tok/s" not in result.output
    assert re.search(r"^3 +3 .* 3 *$", result.output, re.M)


def test_costs_from_a_file_give_a_tree_to_take(costs):
    result = run(EAGLE, "--costs", costs)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert re.search(
        r"Recommended: --tree \S+ [0-9.]+ tokens/s predicted, \+[0-9.]+% over the default .* \(between", said
    )


def test_json(costs):
    found = json.loads(run(EAGLE, "--costs", costs, "--json", "--tree", "top:2x2").output)
    assert found["choice"]["names"][-1] == "choice"
    assert found["recorded_acceptance_length"] > 1
    assert {"recorded", "default", "plain"} <= {name for row in found["trees"] for name in row["names"]}
    asked = next(row for row in found["trees"] if row["tree"] == "top:2x2")
    low, value, high = (asked["tokens_per_s"][name] for name in ("low", "value", "high"))
    assert low < value < high


def test_with_costs_from_a_file_no_torch_is_loaded(costs):
    code = f"""
import sys
from specscope.cli.main import cli
cli(["tune", {str(EAGLE)!r}, "--costs", {str(costs)!r}], standalone_mode=False)
assert "torch" not in sys.modules
"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=env)


def refused(result):
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_what_does_not_fit_together_is_refused(costs, tmp_path):
    assert "holds the costs of drafter eagle" in refused(run(TRACES / "ngram.jsonl", "--costs", costs))
    assert "give --batch 1" in refused(run(EAGLE, "--costs", costs, "--batch", 2))


def test_a_drafter_whose_default_tree_its_config_tells_is_tuned(tmp_path):
    capture = record(Setting("dflash chain", requests=4, tokens=40), tmp_path / "run.jsonl")
    result = run(capture, "--no-costs")
    assert result.exit_code == 0, result.output
    assert "The best static tree of each size" in result.output


def test_a_capture_without_drafts_is_refused(tmp_path):
    history = read_capture(EAGLE).history
    writer = CaptureWriter(tmp_path / "c.jsonl", history.run, history.vocabulary)
    for step in history.steps[:1]:
        writer(step)
    writer.close()
    assert "has no drafts" in refused(run(tmp_path / "c.jsonl", "--no-costs"))


def test_costs_that_are_neither_there_nor_can_be_measured_are_missed(tmp_path):
    history = read_capture(EAGLE).history
    run_of_another = dataclasses.replace(history.run, versions={**history.run.versions, "vllm": "0.11"})
    writer = CaptureWriter(tmp_path / "c.jsonl", run_of_another, history.vocabulary)
    for step in history.steps:
        writer(step)
    writer.close()
    assert "there are no costs at none.json, and" in refused(run(tmp_path / "c.jsonl", "--costs", "none.json"))


def test_an_engine_is_measured_and_its_choice_checked(tmp_path, monkeypatch):
    """The whole way on a tiny engine: capture, costs, choice, check on other prompts."""
    from specscope.measure import step_costs

    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(story(60 + i, 40) for i in range(4)))
    models = ["--target", str(TARGET), "--draft-model", str(HEAD)]
    flags = ["--raw", "--dtype", "float32", "--max-tokens", "20", "--kv-memory", "0.05"]
    capture = ["capture", str(lines), "-o", str(tmp_path / "c.jsonl"), "--tree", "dynamic:12,depth=3,top=4"]
    assert CliRunner().invoke(cli, [*capture, *models, *flags], obj=Lifetime()).exit_code == 0
    lines.write_text("\n".join(story(90 + i, 40) for i in range(3)))
    check = ["--check", "--prompts", lines, "--costs", tmp_path / "costs.json", "--tree", "2", "--nodes", 8]
    result = run(tmp_path / "c.jsonl", *models, *check, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    named = {name: row for row in found["trees"] for name in row["names"]}
    for name in ("plain", "default", "choice"):
        assert named[name]["measured_tokens_per_s"] > 0
    chain = next(row for row in found["trees"] if row["tree"] == "2")
    assert chain["measured_acceptance_length"] == pytest.approx(chain["acceptance_length"]["value"], rel=0.5)
    assert {"none", "2", named["choice"]["tree"] or "none"} <= set(found["checked"]["errors"])
    assert json.loads((tmp_path / "costs.json").read_text())["about"]["drafter"] == "eagle"
    again = json.loads(run(tmp_path / "c.jsonl", "--costs", tmp_path / "costs.json", "--json").stdout)
    assert again["costs"] == found["costs"]  # read, and no model is needed


DAMAGED = Path(__file__).parents[1] / "data" / "damaged"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_recorded_tree_that_cannot_be_read_leaves_the_others_to_be_judged(form):
    found = run(DAMAGED / "tune-indexerror.jsonl", "--no-costs", *form)
    assert found.exit_code == 0, found.output
    assert bool(re.search(r"^4 +4 .* 4 *$", found.output, re.M)) if not form else ('"tree": "4"' in found.output)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_capture_that_tells_of_no_tree_is_refused_in_text_and_json_alike(form):
    found = run(DAMAGED / "tune-max-empty.jsonl", "--no-costs", *form)
    assert isinstance(found.exception, UserError)
    assert str(found.exception).startswith("the capture shows too little to judge any tree")
