"""A start: how the threads of an engine wait, by what else keeps the processors busy, and a line for each stage."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from specscope.live.start import SPINS, WAITING_NAMES, Stages, spare_processors
from tests.waiting import HANG_SECONDS, until

CHOOSE = """
import json, os, sys
from specscope.live.start import WAITING_NAMES, share_cores
share_cores()
assert "torch" not in sys.modules
print(json.dumps({name: os.environ[name] for name in WAITING_NAMES if name in os.environ}))
"""


def chosen(**extra):
    env = {name: value for name, value in os.environ.items() if name not in WAITING_NAMES}
    command = [sys.executable, "-c", CHOOSE]
    ran = subprocess.run(command, env={**env, **extra}, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


@contextmanager
def spinning(count):
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        until(lambda: all(psutil.Process(child.pid).cpu_times().user > 0 for child in children))
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_threads_sleep_soon_where_the_processors_are_taken():
    """What the user chose stays."""
    with spinning(spare_processors() + 1):
        assert chosen() == {"GOMP_SPINCOUNT": SPINS}
        for name in WAITING_NAMES:
            assert chosen(**{name: "7"}) == {name: "7"}


COMPUTE = """
import os, sys, torch
from tests.waiting import until
from specscope.live.start import on_passing_thread
threads = lambda: len(os.listdir("/proc/self/task"))
compute = lambda: torch.ones(1 << 20).exp().sum().item()
torch.set_num_threads(2)
before = threads()
on_passing_thread(compute)
until(lambda: threads() <= before)  # they end by themselves
compute()
print(threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux tells them")
def test_what_a_passing_thread_computes_leaves_no_pool_of_threads():
    ran = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ran.stdout, ran.stderr) == ("1\n", "")  # one that computes here does


def test_a_line_for_each_stage(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stages = Stages("starting torch")
    now[0] += 7.9
    assert stages.begin("loading a model") == "   7 s  starting torch"
    now[0] += 2
    assert stages.lines() == ["   7 s  starting torch", "   2 s  loading a model"]
    assert stages.begin("capturing CUDA graphs: 1 of 20") == "   2 s  loading a model"
    assert stages.begin("capturing CUDA graphs: 2 of 20") == ""  # what counts on is one stage
    assert stages.lines()[2:] == ["   0 s  capturing CUDA graphs: 2 of 20"]
