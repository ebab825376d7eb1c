"""`specscope export`: folders, interruption, what is missing; tests/analyze/export has the tables themselves."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.replay import lengthen
from specscope.analyze.export.schema import SCHEMAS
from tests.support.commands import run_here
from tests.support.samples import EAGLE, PLANTED, SAMPLED
from tests.waiting import HANG_SECONDS, until

NAMES = sorted(f"{name}.parquet" for name in SCHEMAS)


def test_it_writes_and_says_what(tmp_path):
    folder, cut = tmp_path / "tables", tmp_path / "cut.jsonl"
    cut.write_bytes(Path(SAMPLED).read_bytes()[:-20_000])
    code, _, err = run_here(["export", str(cut), "-o", str(folder)])
    assert (code, "specscope: warning: " in err, "was cut off" in err) == (0, True, True)
    code, out, err = run_here(["export", PLANTED, SAMPLED, "-o", str(folder)])
    assert (code, out) == (0, "")
    assert err == f"wrote {folder}: 2 runs, 4 requests, 52 steps, 274 nodes, 52 finals, 280 tokens\n"
    assert sorted(os.listdir(folder)) == NAMES
    assert len(set(pq.read_table(folder / "steps.parquet")["capture"].to_pylist())) == 2


def test_an_older_export_is_replaced(tmp_path):
    for capture, steps in ((SAMPLED, 41), (PLANTED, 11)):
        (tmp_path / "steps.parquet.part").write_bytes(b"PAR1 of a run that was killed")
        assert run_here(["export", capture, "-o", str(tmp_path)])[0] == 0
        assert pq.read_metadata(tmp_path / "steps.parquet").num_rows == steps
        assert sorted(os.listdir(tmp_path)) == NAMES


def test_tables_are_read_by_nobody_else(tmp_path):
    """They hold the prompts."""
    before = os.umask(0)
    try:
        assert run_here(["export", PLANTED, "-o", str(tmp_path / "tables")])[0] == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tables").iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["notes.txt", "steps.parquet", "nodes.parquet.part"])
def test_other_files_are_not_touched(tmp_path, name):
    """Whatever they are called: a table that somebody else wrote too."""
    assert run_here(["export", PLANTED, "-o", str(tmp_path)])[0] == 0
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"x": [1]}), tmp_path / name)
    else:
        (tmp_path / name).write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, err = run_here(["export", SAMPLED, "-o", str(tmp_path)])
    assert code == 2
    assert err == (
        f"specscope: error: {tmp_path} holds '{name}', which is not from an older export: give another folder\n"
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    code, _, err = run_here(["export", PLANTED, "-o", str(tmp_path / "tables")])
    assert (code, err) == (2, f"specscope: error: cannot write {tmp_path}/tables: No space left on device\n")
    assert not (tmp_path / "tables").exists()


def test_without_pyarrow_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['pyarrow'] = None\nfrom specscope.__main__ import main\nmain()"
    words = [sys.executable, "-c", code, "export", PLANTED, "-o", str(tmp_path / "tables")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "specscope: error: this needs pyarrow: pip install 'specscope[export]'\n"
    assert not (tmp_path / "tables").exists()


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("older", [False, True])
def test_an_interrupted_export_leaves_what_was_there(tmp_path, number, older):
    """In a new folder nothing, in that of an older export that one."""
    folder, long = tmp_path / "tables", tmp_path / "long.jsonl"
    lengthen(PLANTED, long, 2500)
    if older:
        assert run_here(["export", PLANTED, "-o", str(folder)])[0] == 0
    process = subprocess.Popen([sys.executable, "-m", "specscope", "export", str(long), "-o", str(folder)])
    until((folder / "runs.parquet.part").exists)
    process.send_signal(number)
    assert process.wait(HANG_SECONDS) == 128 + number
    if older:
        assert sorted(os.listdir(folder)) == NAMES
        assert pq.read_metadata(folder / "steps.parquet").num_rows == 11
    else:
        assert not folder.exists()


def test_tables_leave_out_what_a_capture_recorded_so_leaves_out(tmp_path):
    """Of the same run: what --no-text and --no-tokens take from the tables is what they would have taken from it."""
    for flag in ("--no-text", "--no-tokens"):
        part, folders = tmp_path / f"part{flag}.jsonl", [tmp_path / f"recorded{flag}", tmp_path / f"left{flag}"]
        assert run_here(["export", *(f"{EAGLE}#r{n}" for n in range(3)), "-o", str(part), flag])[0] == 0
        whole = tmp_path / f"part{flag}"
        whole.mkdir()
        full = str(whole / part.name)
        assert run_here(["export", *(f"{EAGLE}#r{n}" for n in range(3)), "-o", full])[0] == 0
        for source, folder, more in ((str(part), folders[0], ()), (full, folders[1], (flag,))):
            assert run_here(["export", source, "-o", str(folder), *more])[0] == 0
        for name in NAMES:
            recorded, left = (pq.read_table(folder / name) for folder in folders)
            out = {"capture", "warnings"}  # the file's name, and what it says of itself
            names = [column for column in left.column_names if column not in out]
            assert recorded.select(names).to_pydict() == left.select(names).to_pydict(), (flag, name)
