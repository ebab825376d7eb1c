"""Signals while something loads: an import that drops the exception does not save the program."""

import signal
import subprocess
import sys

import pytest

from tests.waiting import HANG_SECONDS

SCRIPT = """
import os, signal, threading
from specscope.interrupt import ends_at_once
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
with ends_at_once():
    try:
        os.kill(os.getpid(), {number})
    except BaseException:
        pass
    {more}
print("went on")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("more", ["pass", "threading.Event().wait()"], ids=["soon", "late"])
def test_a_signal_that_was_dropped_ends_it_all_the_same(number, more):
    script = SCRIPT.format(number=int(number), more=more)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert "went on" not in done.stdout
    assert done.returncode in (128 + number, -number, 130)


STARTS = """
import multiprocessing, os, signal
from specscope.interrupt import ignore_terminal

def work(pipe):
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    pipe.send("alive")

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,), daemon=True)
    try:
        with ignore_terminal():
            os.kill(os.getpid(), {number})
            child.start()
    except BaseException as error:
        print(type(error).__name__, "after the child was" if child.pid else "before")
    print(ours.recv())
"""


def test_a_signal_while_a_process_is_started_is_the_parents_and_is_not_lost(tmp_path):
    """Issue 11: Ctrl-C in that moment was dropped, and the screen ran on."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS.format(number=int(signal.SIGINT)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.stdout.splitlines() == ["KeyboardInterrupt after the child was", "alive"], done.stderr
