"""Benchmarks: pieces that they wait for and print, rows of planted faults, and `bench scale` in small."""

import dataclasses
import itertools
import json
import math
import os
import subprocess

import pytest
from click.testing import CliRunner

from benchmarks import scale
from benchmarks.__main__ import bench
from benchmarks.attach import ANSWER, CLOSE, KEY
from benchmarks.debug import NEVER
from benchmarks.faults.rows import begin, compare, read_rows
from benchmarks.faults.run import RARELY, judged
from benchmarks.paired import PairedSides, median_interval
from benchmarks.terminal import module
from specscope.debug.breakpoints import Breakpoints
from specscope.errors import UserError
from specscope.model.kv_cache import KVCache
from tests.faults.fault import in_every_engine
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, Setting
from tests.tiny import write_tiny_model
from tests.tui.sample import replay, running


async def test_the_key_of_attach_opens_what_is_waited_for():
    async with running(replay(5)) as (app, pilot):
        assert ANSWER.decode() not in app.export_screenshot().replace("&#160;", " ")
        await pilot.press(KEY)
        await pilot.pause()
        assert ANSWER.decode() in app.export_screenshot().replace("&#160;", " ")
        await pilot.press({"\x1b": "escape"}[CLOSE])


def test_conditions_of_debug_use_fields_that_there_are():
    breakpoints = Breakpoints()
    for event, condition in NEVER:
        breakpoints.add(event, condition)
    assert len(breakpoints.points) == len(NEVER)


def test_a_module_runs_from_any_folder(tmp_path):
    """Although no child looks in the current one."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        module("benchmarks.replay"), cwd=tmp_path, env=kept | {"PYTHONSAFEPATH": "1"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 20, 41])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    values = list(range(n))
    low, high = median_interval(values)
    assert low + high == n - 1
    below = low + 1  # the interval misses where fewer values than this lie on one side of the median
    misses = 2 * sum(math.comb(n, k) for k in range(below)) / 2**n if n > 1 else 1.0
    assert misses <= 0.05 or (low, high) == (0, n - 1)
    tighter = 2 * sum(math.comb(n, k) for k in range(below + 1)) / 2**n
    assert tighter > 0.05 or high - low <= 2


def test_a_comparison_tells_ratio_and_interval():
    rates = {"a": [99.0, 101.0, 98.0, 100.0, 97.0, 102.0, 100.0], "b": [100.0] * 7}
    row = PairedSides("x", "a", "b", 0.9, rates)
    assert row.ratio == 1.0
    assert all(0.97 <= end <= 1.02 for end in itertools.chain(row.interval))
    assert row.to_dict()["interval"] == row.interval


ROW = {"fault": "x", "how": "always", "expected": ["a"], "named": "a", "place": "target: norm", "unexplained": []}
ROW |= {"processor": 10.0, "seconds": 20.0}


def test_a_fault_is_in_every_engine_until_it_is_closed():
    right, seen = KVCache.move, []

    def install(patch, engine):
        seen.append(KVCache.move is right)
        patch.setattr(KVCache, "move", lambda self, paths: None)

    with in_every_engine(install):
        for _ in range(2):
            engine = Setting("ngram").engine()
            assert KVCache.move is not right
            engine.close()
            assert KVCache.move is right
    assert seen == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["always", RARELY])
def test_a_fault_is_located_in_the_engine_that_runs_again(tmp_path, monkeypatch, how):
    name = "KV not moved, sampled"
    short = dataclasses.replace(SETTINGS[FAULTS[name].setting], requests=2, tokens=24)
    monkeypatch.setitem(SETTINGS, FAULTS[name].setting, short)
    row = judged(name, how, tmp_path)
    assert (row["place"], row["expected"]) == ("target: layers.0.self_attn.keys read", ["target_kv"])
    assert not row["left_out"]
    assert row["processor"] > 0


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({}, ""),
        ({"processor": 11.9}, ""),
        ({"processor": 12.1}, "12.1 s of processor, was 10.0"),
        ({"named": "b"}, "named b, was a"),
        ({"named": None}, "named nothing, was a"),
        ({"place": None}, "place lost, was target: norm"),
        ({"place": "target: lm_head"}, "place target: lm_head, was target: norm"),
    ],
)
def test_rows_that_are_worse_than_they_were(capsys, now, what):
    key = ("x", "always")
    assert compare({key: ROW | now, ("new", "always"): ROW}, {key: ROW, ("gone", "always"): ROW}) == bool(what)
    assert (f"WORSE x, always: {what}\n" if what else "1 rows") in capsys.readouterr().out


def test_a_file_of_rows_says_where_they_were_made(tmp_path):
    begin(tmp_path / "rows.jsonl")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(ROW) + "\n")
    assert read_rows(tmp_path / "rows.jsonl") == {("x", "always"): ROW}
    assert "machine" in json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    (tmp_path / "rows.jsonl").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("scale") / "model"))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(scale, "BATCHES", (1, 3))
    monkeypatch.setattr(scale, "CONTEXTS", (16, 60, 4096))
    monkeypatch.setattr(scale, "LONGS", (60,))
    monkeypatch.setattr(scale, "SHORT", 20)
    monkeypatch.setattr(scale, "read_bandwidth", lambda device: 1e9)


def test_every_point_is_measured_and_written(model, small, tmp_path):
    figures = tmp_path / "scale.json"
    words = ["scale", "--target", model, "--dtype", "float32", "--rounds", "1"]
    result = CliRunner().invoke(bench, [*words, "--json", str(figures)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(figures.read_text())["points"]
    names = ["1 x 20", "3 x 20", "1 x 16", "1 x 60", "7 x 20 + 60"]  # 4,096 are more than the model takes
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert {side: len(rates) for side, rates in row["rates"].items()} == {"specscope": 1, "transformers": 1}
        assert min(min(rates) for rates in row["rates"].values()) > 0
        width = 2 * 2 * 12 * 3 * 4  # keys and values, heads, size, layers, bytes
        assert row["reading_ms"] == pytest.approx(sum(row["lengths"]) * width / 1e6)
        assert row["context_over_its_bytes"] == pytest.approx(row["context_ms"] / row["reading_ms"])
        assert row["context_ms"] >= 0
        assert row["name"].split(" ")[0] in result.output
