"""The default model is converted once, whoever starts at the same time, whatever was killed."""

import os
import signal
import subprocess
import sys

import pytest

from specscope.errors import UserError
from specscope.model import places as bundled
from tests.waiting import HANG_SECONDS, until

# A start whose conversion lasts until its standard input is closed.
START = """
import sys
from pathlib import Path
from specscope.model import places as bundled
def convert(source, folder):
    (folder / "half").touch()
    sys.stdin.read()  # until it is closed
    (folder / "config.json").write_text("{}")
bundled.convert_gguf = convert
print("at", bundled.bundled_model(lambda text: print(text, flush=True)), flush=True)
"""


def start(folder, *, held):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", START]
    pipe, given = subprocess.PIPE, subprocess.PIPE if held else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=given, stdout=pipe, stderr=pipe, text=True, env=environment)


def models(folder):
    return folder / "specscope" / "models"


def test_starts_at_the_same_time_all_have_it(tmp_path):
    starts = [start(tmp_path, held=True) for _ in range(3)]
    until(lambda: len(list(models(tmp_path).glob(".convert-*/half"))) == 3)
    outs = [process.communicate("", timeout=HANG_SECONDS) for process in starts]
    assert [process.returncode for process in starts] == [0, 0, 0], outs
    assert "".join(out for out, _ in outs).count(f"at {models(tmp_path)}") == 3
    assert [p.name for p in models(tmp_path).iterdir()] == [bundled.converted_folder().name]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_conversion_blocks_nobody(tmp_path, sign):
    killed = start(tmp_path, held=True)
    until(lambda: list(models(tmp_path).glob(".convert-*/half")))
    killed.send_signal(sign)
    killed.communicate(timeout=HANG_SECONDS)
    out, error = start(tmp_path, held=False).communicate(timeout=HANG_SECONDS)
    assert f"at {models(tmp_path)}" in out, error


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"cannot store the converted model: cannot write \S+ \(.+\); set XDG"):
        bundled.bundled_model(lambda _: None)
