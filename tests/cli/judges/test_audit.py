"""`specscope diagnose --only audit` and `--trainer`, and a drafter of somebody's own, as people run them."""

import json

import pytest

from specscope import SamplingParams
from specscope.measure import step_costs
from tests.cli.test_main import model, prompts  # noqa: F401
from tests.faults.models import HEAD, TARGET
from tests.measure.head_runs import head_copy, recorded, served
from tests.own import Bigrams
from tests.support.commands import run_here, specscope
from tests.support.samples import EAGLE

LAYERS = ["--drafter", "draft_model", "--draft-model", "self:2", "--tree", "3"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory, prompts, model):  # noqa: F811
    path = tmp_path_factory.mktemp("captured") / "run.jsonl"
    done = specscope("capture", prompts, "-o", path, "--max-tokens", 16, "--temperature", 0.8, *model, *LAYERS)
    assert done.returncode == 0, done.stderr
    return path


def test_a_healthy_capture_passes_by_the_target_that_is_named_or_its_own_where_it_is_what_it_was(captured, tiny):
    done = specscope("diagnose", "--only", "audit", captured, "--sample", 4)
    assert done.returncode == 0, done.stderr
    done = specscope("diagnose", "--only", "audit", captured, "--target", tiny)
    assert done.returncode == 0, done.stderr
    assert "target p" in done.stdout
    assert "draft p" in done.stdout
    assert "The target agrees at" in done.stdout
    assert "The drafter agrees at" in done.stdout
    assert done.stderr == ""


def test_a_target_that_is_not_where_it_was_is_to_be_named(captured, tmp_path):
    key = '"specscope.run.target_path","value":{"stringValue":"'
    assert key in captured.read_text()
    moved = tmp_path / "moved.jsonl"
    moved.write_text(captured.read_text().replace(key, key + "/nowhere"))
    done = specscope("diagnose", "--only", "audit", moved)
    assert (done.returncode, done.stderr.count("\n"), "give --target MODEL" in done.stderr) == (2, 1, True)


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    return served(tmp_path_factory.mktemp("headed") / "run.jsonl", HEAD, requests=1, tokens=20)


def test_a_head_in_training_beside_its_serving(headed, tmp_path):
    done = specscope("diagnose", headed, "--trainer", HEAD, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["captures"][0]["stages"]["audit"]
    assert (found["exit"], found["differences"]) == (0, [])
    assert found["tensors"] > 10
    other = head_copy(tmp_path / "trainer", {"rope_theta": 300.0})
    done = specscope("diagnose", headed, "--trainer", other)
    shown = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stderr
    assert "rope_theta is 10000.0 in the served head, 300.0 in training" in shown
    assert "config: rope_theta" in shown


@pytest.mark.parametrize(
    ("name", "trainer", "message"),
    [
        ("headed", ["nowhere"], "no head at nowhere: give a folder with config.json and model.safetensors"),
        ("headed", [TARGET], "config.json says 7 layers: an EAGLE-1 head has one"),
        ("captured", [HEAD], "the capture's drafter is draft_model: --trainer compares EAGLE heads"),
        ("captured", [HEAD, "--sample", 4], "--trainer compares whole folders: leave out --sample"),
    ],
)
def test_what_a_trainer_cannot_be_and_does_not_go_with(name, trainer, message, captured, headed):
    done = specscope("diagnose", {"captured": captured, "headed": headed}[name], "--trainer", *trainer)
    assert (done.returncode, done.stderr.count("\n"), message in done.stderr) == (2, 1, True), done.stderr


def test_locate_asks_it_again_and_tune_measures_it(tiny, tmp_path, monkeypatch):
    how = {"target": str(tiny), "drafter": Bigrams, "tree": "dynamic:6,depth=3,top=2"}
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8)
    capture = str(recorded(tmp_path / "run.jsonl", ["abcabcabc", "hello hello", "the cat sat"], params, **how))
    locate = ["diagnose", capture, "--only=locate", "--stage=drafter", "--json", f"--target={tiny}"]
    for drafter, says in (
        ("own:Bigrams", "the recorded tree in "),
        ("speculate.drafters.test_own:Duck", "another tree"),
    ):
        code, out, _ = run_here([*locate, f"--drafter=tests.{drafter}"])
        assert (code, f"asked again, drafts {says}" in out) == (says == "another tree", True)
    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    (tmp_path / "p.txt").write_text("abcabc\nx y x y\n")
    tune = ["tune", capture, "--check", f"--prompts={tmp_path}/p.txt", "--nodes=4", "--json", f"--target={tiny}"]
    assert json.loads(run_here([*tune, "--drafter=tests.own:Bigrams"])[1])["choice"]["measured_tokens_per_s"] > 0
    monkeypatch.setattr("specscope.live.start.start_engine", None)  # what is refused loads nothing
    assert "tests.own:Bigrams is your own: give --drafter module:Class" in run_here(tune)[2]
    assert "drafter is eagle, so leave it out" in run_here(["tune", EAGLE, "--drafter=tests.own:Bigrams"])[2]
