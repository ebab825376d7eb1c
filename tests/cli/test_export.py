"""`specscope export`: folders and parts, interruption, refusals; tests/analyze/export has the tables themselves."""

import json
import os
import resource
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
from specscope.trace.wire.reading import read_capture
from tests.support.commands import run_here, said
from tests.support.samples import EAGLE, PLANTED, SAMPLED, TRACES
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
    err = said(["export", SAMPLED, "-o", str(tmp_path)], code=2)[1]
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


@pytest.mark.parametrize("name", ["part.jsonl", "part.jsonl.gz", "part.html"])
def test_a_full_disk_leaves_the_older_file(tmp_path, name):
    path, most = tmp_path / name, resource.getrlimit(resource.RLIMIT_FSIZE)
    said(["export", f"{EAGLE}#r1@1", "-o", str(path)])
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, most[1]))
    try:
        _, err = said(["export", f"{EAGLE}#r1", "-o", str(path)], code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert err.splitlines()[-1] == f"specscope: error: cannot write {path}: File too large"
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(name, before)]


def test_without_pyarrow_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['pyarrow'] = None\nfrom specscope.__main__ import main\nmain()"
    words = [sys.executable, "-c", code, "export", PLANTED, "-o", str(tmp_path / "tables")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "specscope: error: this needs pyarrow: pip install 'specscope[export]'\n"
    assert not (tmp_path / "tables").exists()


@pytest.mark.every(4)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("older", [False, True])
def test_an_interrupted_export_leaves_what_was_there(tmp_path, number, older):
    """In a new folder nothing, in that of an older export that one."""
    folder, long = tmp_path / "tables", tmp_path / "long.jsonl"
    lengthen(PLANTED, long, 1500)
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


def extracted(folder, *words):
    """The file, and the line that was printed."""
    code, out, err = run_here(["export", *words, "-o", str(folder / "part.jsonl")])
    assert (code, out) == (0, ""), err
    return str(folder / "part.jsonl"), err


def answer(words, code=0):
    """A verb's JSON."""
    found, out, err = run_here([*words, "--json"])
    assert found == code, err
    return json.loads(out)


def test_what_was_written_and_what_was_left_out_is_told_in_a_line(tmp_path, monkeypatch):
    path, told = extracted(tmp_path, f"{EAGLE}#r1@3:9")
    size = Path(path).stat().st_size
    rest = len(read_capture(EAGLE).history.requests["r1"].steps) - 7
    assert told == (
        f"wrote {path}: 7 steps of 1 request, {size:,} bytes; left out: 2 other requests, {rest} other steps of r1, "
        "the engine steps' own spans\n"
    )
    _, told = extracted(tmp_path, f"{EAGLE}#r1", f"{EAGLE}#r0@2", "--no-text")
    assert "of 2 requests" in told
    assert told.endswith(
        "left out: 1 other request, 13 other steps of these requests, the engine steps' own spans, text\n"
    )
    assert "--no-text keeps token ids" in told
    monkeypatch.setenv("SPECSCOPE_NO_TOKENS", "1")
    assert "spans, text and token ids" in extracted(tmp_path, f"{EAGLE}#r1")[1]


@pytest.mark.every(2)
@pytest.mark.parametrize("place", ["r0", "r0@2:8"])
@pytest.mark.parametrize("name", ["eagle", "evidence", "ngram", "sampled"])
def test_every_verb_reads_it(name, place, tmp_path):
    whole = str(TRACES / f"{name}.jsonl")
    path, _ = extracted(tmp_path, f"{whole}#{place}")
    (verified,) = answer(["verify", path])["captures"]
    failed = [c for group in verified["groups"] for c in group["checks"] if c["result"] == "failed"]
    assert not failed
    checks = [check for group in verified["groups"] for check in group["checks"]]
    chances = [check for check in checks if check.get("p_value") is not None]
    assert all("unless this part of the run was chosen" in check["note"] for check in chances)
    (report,) = answer(["report", path])["captures"]
    assert [request["id"] for request in report["requests"]] == ["r0"]
    assert answer(["compare", whole, path])["answer"] != "different"
    assert answer(["compare", path, path])["answer"] != "different"
    assert answer(["why", f"{path}#r0@3"])["sentences"][0] == answer(["why", f"{whole}#r0@3"])["sentences"][0]
    for words in (["diagnose", "--no-audit"], ["tune", "--no-costs", "--nodes", "4"], ["why"]):
        code, _, err = run_here([*words, path])
        if words[0] == "tune" and name in ("evidence", "sampled"):  # as it says of the whole capture
            assert (code, "the drafts were sampled" in err) == (2, True)
        else:
            assert code == 0, err
    assert run_here(["export", path, "-o", str(tmp_path / "tables")])[0] == 0
    (tmp_path / "script").write_text("goto r0@3\nwhere\ntree\nnode 0\ninfo step\ninfo requests\nnext\n")
    out, err = said(["debug", path, "--commands", str(tmp_path / "script")])
    assert "and 2 requests of the batch not in this file" in out


@pytest.mark.parametrize("place", ["r0", "r0@3:7", "r0@5:"])
def test_the_planted_bug_is_found_in_the_part_that_has_it(place, tmp_path):
    path, _ = extracted(tmp_path, f"{PLANTED}#{place}")
    (found,) = answer(["diagnose", "--no-audit", path], code=1)["captures"]
    assert found["suspects"][0]["cause"] == "draft_position"
