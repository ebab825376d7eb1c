"""A drafter of somebody's own, named on the command line of the judges: it drafts again."""

import json

from specscope import SamplingParams
from specscope.measure import step_costs
from tests.measure.head_runs import recorded
from tests.own import Bigrams
from tests.support.commands import run_here
from tests.support.samples import EAGLE


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
