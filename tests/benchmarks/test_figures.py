"""`python -m benchmarks figures`: what it sums and lays side by side."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import run as figures

ROOT = Path(__file__).parents[2]
HOW = {"rounds": 1, "steps": 100, "prompts": 2, "target": None, "dtype": "float32", "busy": False, "vllm": None}


def test_a_command_takes_time_and_memory():
    took = figures.taken(ROOT, "--version")
    assert took["processor_s"] > 0
    assert 10 < took["peak_mb"] < 500


@pytest.mark.slow
def test_every_part_is_measured_of_each_checkout(tiny, tmp_path, monkeypatch):
    """All but what the checkout's own benchmarks measure."""
    monkeypatch.setitem(figures.DRAFTING, "drafting", {"drafter": "ngram", "tree": "3"})
    parts = ["reading", "start", "speed"]
    figures.run_figures(str(tmp_path), ["a=.", "b=."], parts, None, **HOW | {"target": str(tiny)})
    found = json.loads((tmp_path / "figures.json").read_text())
    for part in parts:
        assert found[part]["a"].keys() == found[part]["b"].keys() > set()
    assert all(row["peak_mb"] > 10 for row in found["reading"]["a"].values())
    drafting = found["speed"]["a"]["batch 8, drafting"]
    assert {"tokens_s", "over generate()", "over a, plain", "over b, drafting", "over b, drafting, from"} <= set(
        drafting
    )
