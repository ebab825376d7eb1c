"""`python -m benchmarks figures`: what it sums and lays side by side."""

import json
from pathlib import Path

from benchmarks.figures import run as figures

ROOT = Path(__file__).parents[2]


def test_figures_of_checkouts_and_of_before_stand_beside_each_other(tmp_path, capsys, monkeypatch):
    how = {"rounds": 1, "steps": 100, "prompts": 1, "dtype": "float32", "busy": False, "vllm": None}
    monkeypatch.setitem(figures.PARTS, "start", lambda plan, console: {of: {"x": {"s": 2.0}} for of in plan.checkouts})
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"start": {"old": {"x": {"s": 4.0}}}}))
    figures.run_figures(str(tmp_path / "out"), ["new=."], ["start"], str(before), **how)
    assert "0.500" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/figures.json").read_text())["start"] == {"new": {"x": {"s": 2.0}}}


def test_a_command_takes_time_and_memory():
    took = figures.taken(ROOT, "--version")
    assert took["processor_s"] > 0
    assert 10 < took["peak_mb"] < 500
