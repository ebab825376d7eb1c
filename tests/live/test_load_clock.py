"""How far an engine has loaded: by usual times at first, then by what the stages took last time."""

from __future__ import annotations

import pytest

from specscope.engine.config import EngineConfig
from specscope.live.client import LoadClock

STAGES = (("starting torch", 3.0), ("loading a model", 10.0), ("loading a head", 2.0))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def load(stages=STAGES, config=None):
    """A start whose stages take so long; (share, seconds left) at the middle of each."""
    time = Clock()
    clock, seen = LoadClock(config or EngineConfig(), time), []
    for stage, seconds in stages:
        clock.enter(stage)
        time.now += seconds / 2
        assert clock.progress[0] == stage
        seen.append(clock.progress[1:])
        time.now += seconds / 2
    clock.done()
    return seen


def test_the_first_start_goes_by_usual_times():
    assert load() == [(0.15, 9), (0.89, 1), (0.74, 5)]  # 1.5 of 4 s and 6 s; 5 of 6 s; 1 of 6 s more


def test_the_next_start_goes_by_the_last_one():
    load()
    assert load() == [(0.1, 14), (0.53, 7), (0.93, 1)]
    other = load(config=EngineConfig(drafter="ngram"))
    assert other[0] != (0.1, 14)  # another engine takes another time


def test_a_stage_that_comes_once_is_not_waited_for_again():
    load((*STAGES, ("measuring once what a step costs on this machine", 12.0)))
    assert load() == [(0.1, 14), (0.53, 7), (0.93, 1)]


def test_a_stage_that_is_late_has_no_time_left_and_is_not_done():
    load()
    time = Clock()
    clock = LoadClock(EngineConfig(), time)
    for stage, seconds in STAGES[:2]:
        clock.enter(stage)
        time.now += seconds
    clock.enter(STAGES[2][0])
    time.now += 60
    assert clock.progress == ("loading a head", 0.99, None)


def test_what_follows_a_colon_is_the_same_stage():
    time = Clock()
    clock = LoadClock(EngineConfig(), time)
    for at in range(1, 5):
        clock.enter(f"capturing CUDA graphs: {at} of 4")
        time.now += 1
    assert clock.progress[0] == "capturing CUDA graphs: 4 of 4"
    clock.done()
    again = LoadClock(EngineConfig(), time)
    again.enter("capturing CUDA graphs: 1 of 4")
    time.now += 1
    assert again.progress[2] == 3


def test_a_file_that_cannot_be_read_is_as_none(tmp_path):
    fresh = load()
    (file,) = tmp_path.rglob("*.json")
    file.write_text("[1]")
    assert load() == fresh


def test_weights_on_this_machine_take_their_time(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with open(tmp_path / "model" / "model.safetensors", "wb") as file:
        file.truncate(3_000_000_000)
    config = EngineConfig(target=str(tmp_path / "model"), drafter="none")
    assert load(config=config)[0][1] == load(config=EngineConfig(drafter="none"))[0][1] + 10
