"""An engine that the screen started: real processes that write a log and end, or are ended."""

import subprocess
import sys
from contextlib import contextmanager

import pytest

from specscope.debug.viewer import Viewer
from specscope.remote.attached import KEPT_LINES, EngineLog, LaunchedEngine, end_of, last_lines
from specscope.tui.app import ScopeApp
from tests.tui.sample import until as shown
from tests.waiting import until

WEIGHTS = "(Worker pid=7) ERROR 11-26 21:01:45 [executor.py:953] safetensors.SafetensorError: header too small\n"
DIES = f"""
(APIServer pid=3) INFO 11-26 21:01:00 [api.py:3] it begins

{WEIGHTS}Traceback (most recent call last):
  File "/x/entry.py", line 83, in main
RuntimeError: Engine core initialization failed. See root cause above.
"""


@contextmanager
def launched(folder, code):
    """(The control, its viewer) of a Python process that runs this code."""
    control = LaunchedEngine("vLLM")
    viewer = control.viewer = Viewer(control=control)
    output = folder / "log"
    with output.open("w") as log:
        process = subprocess.Popen([sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=log, stderr=log)
    control.follow(process, output)
    try:
        yield control, viewer
    finally:
        process.kill()
        process.communicate()
        control.close()


def test_its_log_is_read_as_it_grows(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"")
    log = EngineLog(path)
    assert not log.read()
    with path.open("ab") as file:
        for piece in (b"one\n\ntw", b"o\r\n\x1b[32mgreen\x1b[0m\nshards: 0%\rshards: 50%", b"\rshards: 100%\n"):
            file.write(piece)
            file.flush()
            assert log.read()
    assert log.lines == ("one", "two", "green", "shards: 100%")
    with path.open("ab") as file:
        file.write(b"(EngineCore pid=2) half a l\xffine")
    log.read()
    assert log.lines[-1] == "half a l�ine"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(10_000)))
    assert last_lines(path, 2) == ("9998", "9999")
    assert len(last_lines(path, 10_000)) == KEPT_LINES


@pytest.mark.parametrize(
    ("code", "killed", "error"),
    [
        (f"print({DIES!r}); raise SystemExit(3)", False, "exit code 3: safetensors.SafetensorError: header too small"),
        ("input()", True, "signal SIGKILL"),
        ("print('done')", False, ""),
    ],
)
def test_one_that_ends_says_how_and_why(tmp_path, code, killed, error):
    with launched(tmp_path, code) as (control, viewer):
        assert control.status == "loading"
        if killed:
            control._engine.kill()
        until(lambda: control.status == "ended", meanwhile=viewer.poll)
        assert control.error == error
        assert not viewer.live
        assert not control.log or control.log[-1] == "done" or control.log[-1].startswith("RuntimeError: Engine core")
    assert end_of(0) == "exit code 0"


async def test_the_screen_shows_the_log_while_it_loads_and_how_it_ended(tmp_path):
    ends = f"print({DIES!r}); raise SystemExit(3)"
    code = f"print('loading weights'); input(); print('specscope: watching it'); input(); {ends}"
    with launched(tmp_path, code) as (control, viewer):
        app = ScopeApp(viewer, title="vLLM")
        async with app.run_test(size=(80, 24)) as pilot:
            await shown(pilot, lambda: "loading weights" in said(app))
            assert "◌ loading" in said(app, "#status")
            assert not app.query_one("#requests").display
            press_enter(control)
            await shown(pilot, lambda: "watching it loading weights" in said(app))
            assert "○ idle" in said(app, "#status")
            press_enter(control)
            await shown(pilot, lambda: "■ failed" in said(app, "#status"))
            assert "it ended: exit code 3: safetensors.SafetensorError: header too small" in said(app)
            assert "RuntimeError: Engine core initialization failed" in said(app)


def said(app, panel="#tree"):
    return " ".join(text.strip() for line in app.query_one(panel).sheet.lines for text, _ in line)


def press_enter(control):
    control._engine.stdin.write(b"\n")
    control._engine.stdin.flush()
