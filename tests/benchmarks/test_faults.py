"""`python -m benchmarks faults`: where faults are planted, and which rows are worse than they were."""

import dataclasses
import json

import pytest

from benchmarks.faults.rows import begin, compare, read_rows
from benchmarks.faults.run import RARELY, judged
from specscope.errors import UserError
from specscope.model.kv_cache import KVCache
from tests.faults.fault import in_every_engine
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, Setting

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


@pytest.mark.parametrize("how", ["always", pytest.param(RARELY, marks=pytest.mark.slow)])
def test_a_fault_is_located_in_the_engine_that_runs_again(tmp_path, monkeypatch, how):
    name = "KV not moved, sampled"
    short = dataclasses.replace(SETTINGS[FAULTS[name].setting], requests=2, tokens=24)
    monkeypatch.setitem(SETTINGS, FAULTS[name].setting, short)
    row = judged(name, how, tmp_path)
    assert row["place"] == "target: layers.0.self_attn.keys read"
    assert row["expected"] == ["target_kv"]
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
