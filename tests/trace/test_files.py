"""Files that are read whole: bounded, and never of a device or a pipe. Files that are written: whole or not at all."""

import contextlib
import os
import resource

import pytest

from specscope.errors import UserError
from specscope.trace.files import read_whole, write_whole
from tests.test_bad_input import run_here
from tests.test_traces import TRACES

PLANTED = str(TRACES / "planted.jsonl")


def test_a_file_within_the_limit_is_read_and_one_beyond_it_is_not(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 2**20)
    assert len(read_whole(tmp_path / "a", "the data", 2**20)) == 2**20
    (tmp_path / "a").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(UserError, match=r"cannot read the data .*a: it is larger than 1 MiB, the limit"):
        read_whole(tmp_path / "a", "the data", 2**20)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "."])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["tune", PLANTED, "--costs"], "the costs"),
        (["train", "eagle3", "-o", "new", "--data"], "the data"),
    ],
)
def test_what_has_no_end_is_refused(words, what, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    code, _, err = run_here([*words, name])
    assert (code, err) == (2, f"specscope: error: cannot read {what} {name}: it is no regular file\n")
    assert not (tmp_path / "new").exists()


@contextlib.contextmanager
def a_full_disk(size):
    """No file grows beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("older", ["<!doctype html>older", None])
@pytest.mark.parametrize("words", [["report", "--html", "page.html"], ["tune", "--no-costs", "--plot", "page.svg"]])
def test_a_page_on_a_full_disk_leaves_what_was_there(words, older, tmp_path, monkeypatch):
    verb, *flags, name = words
    older = older and older.replace("<!doctype html>", "<?xml") if name.endswith("svg") else older
    monkeypatch.chdir(tmp_path)
    if older is not None:
        (tmp_path / name).write_text(older)
    with a_full_disk(1000):
        code, _, err = run_here([verb, PLANTED, *flags, name])
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
