"""What was measured on a machine that others kept busy is not kept for good."""

import os
import subprocess
import sys
import time

from specscope.user_cache import Others, is_good, is_quiet

EVEN = [[1.0, 1.01, 1.02, 1.0, 1.03]] * 3


def test_others_that_take_processors_are_seen():
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        others = Others()
        time.sleep(1.0)
        assert others.busy() > 0.5
    finally:
        spin.kill()
        spin.wait()


def test_its_own_work_is_not_others():
    """Beside the same neighbours, a busy time and an idle one differ by less than the processor that it had itself."""
    found = {True: [], False: []}
    for mine in (True, False) * 5:  # neighbours come and go: the quietest of each counts
        others, end = Others(), time.monotonic() + 0.3
        while time.monotonic() < end:
            if not mine:
                time.sleep(0.01)
        found[mine].append(others.busy())
    assert min(found[True]) < min(found[False]) + 0.5


LOOK = """
import time
from specscope.user_cache import Others
all, without_parent = Others(), Others(with_parent=False)
time.sleep(1.0)
print(all.busy() - without_parent.busy())
"""


def test_the_parent_can_be_left_out():
    """A screen starts the engine's process and is busy with its own start."""
    child = subprocess.Popen([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True)
    while child.poll() is None:
        pass
    assert float(child.stdout.read()) > 0.3


def test_even_figures_are_quiet_only_without_neighbours(monkeypatch):
    """A neighbour that runs all the time slows every call alike: the calls do not show it."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert is_quiet(EVEN, 0.1, threads=4)
    assert not is_quiet(EVEN, 1.0, threads=4)
    assert is_quiet(EVEN, 1.0, threads=2)  # two processors are left
    assert not is_quiet(EVEN, 2.5, threads=2)
    assert not is_quiet([[1.0, 1.0, 2.0, 2.0, 2.0]] * 3, 0.0, threads=1)


def test_figures_of_a_busy_machine_are_taken_again(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text("{}")
    assert is_good(file, quiet=False)
    an_hour_ago = time.time() - 3700
    os.utime(file, (an_hour_ago, an_hour_ago))
    assert not is_good(file, quiet=False)
    assert is_good(file, quiet=True)
