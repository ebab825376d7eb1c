"""A start says what it does, a line for each stage, and how long each took."""

import re

from specscope.live.start import Stages


def test_a_line_for_each_stage(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stages = Stages("starting torch")
    now[0] += 7.9
    assert stages.begin("loading a model") == "   7 s  starting torch"
    now[0] += 2
    assert stages.lines() == ["   7 s  starting torch", "   2 s  loading a model"]


def test_what_counts_on_is_one_stage():
    stages = Stages("loading")
    stages.begin("capturing CUDA graphs: 1 of 20")
    assert stages.begin("capturing CUDA graphs: 2 of 20") == ""
    assert [re.sub(r"^ *\d+ s  ", "", line) for line in stages.lines()] == ["loading", "capturing CUDA graphs: 2 of 20"]
