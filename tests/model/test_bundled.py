"""The default model is converted once, whoever starts at the same time, whatever was killed, wherever there is room."""

import os
import signal
import subprocess
import sys

import pytest

from specscope.errors import UserError
from specscope.model import bundled
from tests.waiting import HANG_SECONDS, until

# A start whose conversion lasts until its standard input is closed, and leaves a line behind.
START = """
import sys
from pathlib import Path
from specscope.model import bundled
def convert(source, folder):
    with open(sys.argv[1], "a") as log:
        log.write("converted\\n")
    (folder / "half").touch()
    sys.stdin.read()  # until it is closed
    (folder / "config.json").write_text("{}")
bundled.convert_gguf = convert
print("at", bundled.bundled_model(lambda text: print(text, flush=True)), flush=True)
"""


def start(folder, *, held):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", START, str(folder / "log")]
    pipe, given = subprocess.PIPE, subprocess.PIPE if held else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=given, stdout=pipe, stderr=pipe, text=True, env=environment)


def models(folder):
    return folder / "specscope" / "models"


def test_starts_at_the_same_time_share_one_conversion(tmp_path):
    starts = [start(tmp_path, held=True) for _ in range(3)]
    first = [process.stdout.readline() for process in starts]
    assert sum(line.startswith("waiting for another process") for line in first) == 2, first
    for process in starts:
        process.stdin.close()
        process.stdin = None  # communicate() would flush it
    outs = [process.communicate(timeout=HANG_SECONDS) for process in starts]
    assert [process.returncode for process in starts] == [0, 0, 0], outs
    assert (tmp_path / "log").read_text() == "converted\n"
    text = "".join((*first, *(out for out, _ in outs)))
    assert text.count("converting SmolLM2") == 1
    assert text.count(f"at {models(tmp_path)}") == 3
    assert [p.name for p in models(tmp_path).iterdir() if not p.name.endswith(".lock")] == [
        bundled.converted_folder().name
    ]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_conversion_blocks_nobody_and_leaves_nothing(tmp_path, sign):
    killed = start(tmp_path, held=True)
    until(lambda: list(models(tmp_path).glob(".convert-*/half")))
    waiting = start(tmp_path, held=False)
    assert waiting.stdout.readline().startswith("waiting for another process")
    killed.send_signal(sign)
    killed.communicate(timeout=HANG_SECONDS)
    out, error = waiting.communicate(timeout=HANG_SECONDS)
    assert waiting.returncode == 0, error
    assert "converting" in out
    assert not list(models(tmp_path).glob(".convert-*"))


def converted(source, folder):
    (folder / "config.json").write_text("{}")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A cache that is a file, and a folder for temporary files."""
    (tmp_path / "cache").write_text("a file")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(bundled, "convert_gguf", converted)
    return tmp_path


def test_a_folder_that_others_can_write_is_not_trusted(places):
    folder = bundled.bundled_model(lambda _: None)
    folder.parent.chmod(0o777)
    with pytest.raises(
        UserError, match=r"cannot store the converted model: cannot write .*set XDG_CACHE_HOME"
    ) as error:
        bundled.bundled_model(lambda _: None)
    assert "belongs to another user" in str(error.value)
    assert "\n" not in str(error.value)
