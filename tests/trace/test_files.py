"""Files that are read whole: bounded. Files that are written: whole or not at all, and what each may replace."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from specscope.errors import UserError
from specscope.trace.files import CAPTURE, Existing, TakenError, check_output, open_capture
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from specscope.whole_file import read_whole, write_whole
from tests.processes import room_for
from tests.support.commands import run_here
from tests.support.samples import PLANTED
from tests.trace.strategies import RUN


def test_a_file_within_the_limit_is_read_and_one_beyond_it_is_not(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 2**20)
    assert len(read_whole(tmp_path / "a", "the data", 2**20)) == 2**20
    (tmp_path / "a").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(UserError, match=r"cannot read the data .*a: it is larger than 1 MiB, the limit"):
        read_whole(tmp_path / "a", "the data", 2**20)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "."])
def test_what_has_no_end_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    code, _, err = run_here(["tune", PLANTED, "--costs", name])
    assert (code, err) == (2, f"specscope: error: cannot read the costs {name}: it is no regular file\n")


# Captures that are there already

OLD = Path(PLANTED).read_bytes()
REFUSED = "refused"
NEW = "run.2.jsonl"
# What is there, and what becomes of it by each rule: the name that is written, or why none is
CONTENTS = {
    "nothing": (None, "run.jsonl", "run.jsonl", "run.jsonl"),
    "an empty file": (b"", "run.jsonl", "run.jsonl", "run.jsonl"),
    "a capture": (OLD, "run.jsonl", REFUSED, NEW),
    "something else": (b"my notes\n", REFUSED, REFUSED, NEW),
    "spans of another program": (b'{"resourceSpans":[{"resource":{"attributes":[]}}]}\n', REFUSED, REFUSED, NEW),
    "JSON": (b'{"a": 1}\n', REFUSED, REFUSED, NEW),
}


@pytest.mark.parametrize("existing", Existing)
@pytest.mark.parametrize("content", CONTENTS)
def test_what_becomes_of_a_file_that_is_there(content, existing, tmp_path):
    before, *names = CONTENTS[content]
    name = names[list(Existing).index(existing)]
    path = tmp_path / "run.jsonl"
    if before is not None:
        path.write_bytes(before)
    if name == REFUSED:
        for write in (
            lambda: check_output(str(path), "-o", (), CAPTURE, existing),
            lambda: CaptureWriter(path, RUN, Vocabulary(), existing=existing),
        ):
            with pytest.raises(TakenError, match=r"run.jsonl exists"):
                write()
    else:
        check_output(str(path), "-o", (), CAPTURE, existing)
        writer = CaptureWriter(path, RUN, Vocabulary(), existing=existing)
        writer.close()
        assert writer.path == tmp_path / name
        assert writer.renamed == ("" if name == "run.jsonl" else f"{path} exists: capturing to {writer.path}")
        assert read_capture(writer.path).history.run == RUN
    if name != "run.jsonl":
        assert path.read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} == {"run.jsonl", name} - {REFUSED}


def test_a_new_name_is_the_first_that_is_free(tmp_path, monkeypatch):
    for number in (1, 2, 4):
        path = tmp_path / ("run.jsonl" if number == 1 else f"run.{number}.jsonl")
        path.write_bytes(OLD)
    writer = CaptureWriter(tmp_path / "run.jsonl", RUN, Vocabulary(), existing=Existing.NEW_NAME)
    other = CaptureWriter(tmp_path / "run.jsonl", RUN, Vocabulary(), existing=Existing.NEW_NAME)
    assert (writer.path.name, other.path.name) == ("run.3.jsonl", "run.5.jsonl")
    writer.close()
    other.close()
    monkeypatch.setattr("specscope.trace.files.MOST_NAMES", 4)
    (tmp_path / "run.3.jsonl").write_bytes(OLD)
    with pytest.raises(TakenError, match=r"run.jsonl exists, and so do 2 names like it"):
        open_capture(tmp_path / "run.jsonl", Existing.NEW_NAME)


@pytest.mark.parametrize("existing", [Existing.REPLACE, Existing.REFUSE])
def test_a_second_writer_of_a_file_is_refused(existing, tmp_path):
    path = tmp_path / "run.jsonl"
    writer = CaptureWriter(path, RUN, Vocabulary())
    first = path.read_bytes()
    with pytest.raises(TakenError, match=r"run.jsonl is being written by another process: give another name"):
        CaptureWriter(path, RUN, Vocabulary(), existing=existing)
    code, _, err = run_here(["capture", "abc", "-o", str(path), "--target", "/no/such/model"])
    assert (code, err) == (
        2, f"specscope: error: {path} is being written by another process: give another name\n"
    )  # fmt: skip
    assert path.read_bytes() == first
    writer.close()
    CaptureWriter(path, RUN, Vocabulary()).close()


WRITES = """
import sys
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.record.vocabulary import Vocabulary
from tests.trace.strategies import RUN
writer = CaptureWriter(sys.argv[1], RUN, Vocabulary())
print("writes", flush=True)
sys.stdin.read()
"""


def test_a_writer_that_was_killed_leaves_no_lock(tmp_path):
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-c", WRITES, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "writes\n"
            with pytest.raises(TakenError, match="is being written by another process"):
                CaptureWriter(path, RUN, Vocabulary())
        finally:
            other.send_signal(signal.SIGKILL)
    CaptureWriter(path, RUN, Vocabulary()).close()
    assert [one.name for one in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("before", [None, 0o644])
def test_a_capture_is_read_by_nobody_else(before, tmp_path):
    path = tmp_path / "run.jsonl"
    if before is not None:
        path.write_bytes(OLD)
        path.chmod(before)
    old = os.umask(0)
    try:
        CaptureWriter(path, RUN, Vocabulary()).close()
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


OTHERS = {
    "page.html": (["export", PLANTED, "-o"], b"<!DOCTYPE html>\n<title>Holiday</title>\n", "was not written by"),
    "costs.json": (["tune", PLANTED, "--costs"], b'{\n  "name": "my-package"\n}\n', "holds no costs"),  # it is read
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_outputs_replace_older_ones_of_their_kind_and_nothing_that_looks_like_them(name, tmp_path):
    (words, theirs, why), path = OTHERS[name], tmp_path / name
    if name != "costs.json":  # which takes measurements
        assert {run_here([*words, str(path)])[0] for _ in range(2)} <= {0, 1}
        assert path.stat().st_size
    path.write_bytes(theirs)
    code, _, err = run_here([*words, str(path)])
    assert code == 2
    assert str(path) in err
    assert why in err
    assert path.read_bytes() == theirs


@pytest.mark.parametrize("older", ["<!doctype html><title>specscope older", None])
def test_a_page_on_a_full_disk_leaves_what_was_there(older, tmp_path, monkeypatch):
    name = "page.html"
    monkeypatch.chdir(tmp_path)
    if older is not None:
        (tmp_path / name).write_text(older)
    with room_for(1000):
        code, _, err = run_here(["export", PLANTED, "-o", name])
    assert (code, err) == (2, f"specscope: error: cannot write {name}: File too large\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == ({} if older is None else {name: older})


def test_a_file_is_replaced_with_its_mode_and_behind_its_link(tmp_path):
    (tmp_path / "page").write_text("older")
    (tmp_path / "page").chmod(0o640)
    (tmp_path / "link").symlink_to("page")
    write_whole(tmp_path / "link", b"newer")
    assert (tmp_path / "link").is_symlink()
    assert ((tmp_path / "page").read_bytes(), (tmp_path / "page").stat().st_mode & 0o777) == (b"newer", 0o640)
    write_whole(tmp_path / "new", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "new", "page"]
