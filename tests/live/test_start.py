"""A start: how the threads of an engine wait, by what else keeps the processors busy, and a line for each stage."""

import json
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
for chosen in json.load(sys.stdin):
    for name in WAITING_NAMES:
        os.environ.pop(name, None)
    os.environ |= chosen
    share_cores()
    print(json.dumps({name: os.environ[name] for name in WAITING_NAMES if name in os.environ}))
assert "torch" not in sys.modules
"""


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
    cases = [{}, *({name: "7"} for name in WAITING_NAMES)]
    with spinning(spare_processors() + 1):
        command, given = [sys.executable, "-c", CHOOSE], json.dumps(cases)
        ran = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [{"GOMP_SPINCOUNT": SPINS}, *cases[1:]]


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
