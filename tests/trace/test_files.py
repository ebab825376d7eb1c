"""Files that are read whole: bounded, and never of a device or a pipe."""

import os

import pytest

from specscope.errors import UserError
from specscope.trace.files import read_whole
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
