"""`specscope tune`: text, JSON, costs from a file, and what it refuses."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specscope.plans.costs import CostPoint, Costs, about_run, write_costs
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.faults.models import HEAD, TARGET, story
from tests.faults.settings import Setting, record
from tests.support.commands import run_here, specscope
from tests.support.samples import EAGLE, NGRAM


def tuned(*words):
    """What is printed."""
    done = specscope("tune", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_acceptance_alone_needs_no_costs(tmp_path):
    out = tuned(EAGLE, "--no-costs", "--nodes", 8, "--tree", "3")
    assert "The best static tree of each size" in out
    assert "The best dynamic tree of each size" in out
    assert "tok/s" not in out
    assert re.search(r"^3 +3 .* 3 *$", out, re.M)
    told_by_its_config = record(Setting("dflash chain", requests=4, tokens=40), tmp_path / "run.jsonl")
    assert "The best static tree of each size" in tuned(told_by_its_config, "--no-costs")


def test_costs_from_a_file_give_a_tree_to_take(costs):
    said = " ".join(tuned(EAGLE, "--costs", costs).split())
    assert re.search(
        r"Recommended: --tree \S+ [0-9.]+ tokens/s predicted, \+[0-9.]+% over the default .* \(between", said
    )
    words = ["tune", EAGLE, "--costs", str(costs), "--json", "--tree", "top:2x2"]
    code = f"import sys; from specscope.cli.main import cli\ncli({words!r}, standalone_mode=False)\n"
    code += "assert 'torch' not in sys.modules"
    found = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert found["choice"]["names"][-1] == "choice"
    assert found["recorded_acceptance_length"] > 1
    assert {"recorded", "default", "plain"} <= {name for row in found["trees"] for name in row["names"]}
    asked = next(row for row in found["trees"] if row["tree"] == "top:2x2")
    low, value, high = (asked["tokens_per_s"][name] for name in ("low", "value", "high"))
    assert low < value < high


DAMAGED = Path(__file__).parents[1] / "data" / "damaged"


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """One without drafts, and one of another engine."""
    history, folder = read_capture(EAGLE).history, tmp_path_factory.mktemp("captures")
    others = dataclasses.replace(history.run, versions={**history.run.versions, "vllm": "0.11"})
    for name, run, steps in (("none", history.run, history.steps[:1]), ("vllm", others, history.steps)):
        writer = CaptureWriter(folder / f"{name}.jsonl", run, history.vocabulary)
        for step in steps:
            writer(step)
        writer.close()
    return folder


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{NGRAM} --costs COSTS", "holds the costs of drafter eagle"),
        (f"{EAGLE} --costs COSTS --batch 2", "give --batch 1"),
        ("MADE/none.jsonl --no-costs", "has no drafts"),
        ("MADE/vllm.jsonl --costs none.json", "there are no costs at none.json, and"),
        (f"{DAMAGED}/tune-max-empty.jsonl --no-costs", "error: the capture shows too little to judge any tree"),
    ],
)
def test_what_tells_no_tree_or_does_not_fit_together_is_refused(words, says, form, costs, captures):
    words = words.replace("COSTS", str(costs)).replace("MADE", str(captures)).split()
    code, out, err = run_here(["tune", *words, *form])
    assert (code, err.count("\n"), bool(out)) == (2, 1, bool(form))
    assert says in err


def test_an_engine_is_measured_and_its_choice_checked(tmp_path, monkeypatch):
    """The whole way on a tiny engine: capture, costs, choice, check on other prompts."""
    from specscope.measure import step_costs

    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(story(60 + i, 40) for i in range(4)))
    models = ["--target", str(TARGET), "--draft-model", str(HEAD)]
    flags = ["--raw", "--dtype", "float32", "--max-tokens", "20", "--kv-memory", "0.05"]
    capture = ["capture", lines, "-o", tmp_path / "c.jsonl", "--tree", "dynamic:12,depth=3,top=4"]
    assert specscope(*capture, *models, *flags).returncode == 0
    lines.write_text("\n".join(story(90 + i, 40) for i in range(3)))
    check = ["--check", "--prompts", lines, "--costs", tmp_path / "costs.json", "--tree", "2", "--nodes", 8]
    found = json.loads(tuned(tmp_path / "c.jsonl", *models, *check, "--json"))
    named = {name: row for row in found["trees"] for name in row["names"]}
    for name in ("plain", "default", "choice"):
        assert named[name]["measured_tokens_per_s"] > 0
    chain = next(row for row in found["trees"] if row["tree"] == "2")
    assert chain["measured_acceptance_length"] == pytest.approx(chain["acceptance_length"]["value"], rel=0.5)
    assert {"none", "2", named["choice"]["tree"] or "none"} <= set(found["checked"]["errors"])
    assert json.loads((tmp_path / "costs.json").read_text())["about"]["drafter"] == "eagle"
    again = json.loads(tuned(tmp_path / "c.jsonl", "--costs", tmp_path / "costs.json", "--json"))
    assert again["costs"] == found["costs"]  # read, and no model is needed


def test_a_recorded_tree_that_cannot_be_read_leaves_the_others_to_be_judged():
    for form, says in (([], r"^4 +4 .* 4 *$"), (["--json"], '"tree": "4"')):
        assert re.search(says, tuned(DAMAGED / "tune-indexerror.jsonl", "--no-costs", *form), re.M)
