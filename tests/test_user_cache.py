"""What was measured on a machine that others kept busy is not kept for good."""

import os
import stat
import subprocess
import sys
import time

import psutil
import pytest

from specscope.user_cache import Others, is_good, is_quiet, own_folder
from tests.waiting import HANG_SECONDS

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


@pytest.mark.parametrize("own", [0.0, 1.5])
def test_its_own_work_is_not_others(monkeypatch, own):
    """Of five seconds that processors worked in two, this process had `own`."""
    times = psutil.cpu_times()
    none = times._replace(**dict.fromkeys(times._fields, 0.0))

    with monkeypatch.context() as patch:

        def clocks(now, all_of_them, mine):
            patch.setattr("time.monotonic", lambda: now)
            patch.setattr("psutil.cpu_times", lambda: none._replace(user=all_of_them, idle=9 * now))
            patch.setattr("os.times", lambda: os.times_result((mine, 0, 0, 0, now)))

        clocks(100.0, 700.0, 30.0)
        others = Others()
        clocks(102.0, 705.0, 30.0 + own)
        busy = others.busy()
    assert busy == pytest.approx((5.0 - own) / 2.0)


LOOK = """
import time
from specscope.user_cache import Others
all, without_parent, began = Others(), Others(with_parent=False), time.monotonic()
while (all.busy() - without_parent.busy()) * (time.monotonic() - began) < 1.0:  # seconds that the parent had
    time.sleep(0.05)
print("seen")
"""


def test_the_parent_can_be_left_out():
    """A screen starts the engine's process and is busy with its own start."""
    child = subprocess.Popen([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + HANG_SECONDS
    while child.poll() is None and time.monotonic() < end:
        pass
    child.kill()
    assert child.stdout.read() == "seen\n"


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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specscope"


def test_a_folder_of_kernels_is_for_this_user_alone(cache):
    """Whatever the umask is, and where an earlier start made the folders above it."""
    cache.mkdir()
    cache.chmod(0o775)
    before = os.umask(0)
    try:
        own_folder(cache / "kernels" / "version")
    finally:
        os.umask(before)
    for folder in (cache, cache / "kernels", cache / "kernels" / "version"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("which", ["", "kernels", "kernels/version"])
def test_a_folder_of_another_user_is_refused(cache, which, monkeypatch):
    (cache / which).mkdir(parents=True)
    real, planted = os.stat, (cache / which).stat().st_ino

    def of_another(path, **how):
        held = real(path, **how)
        return os.stat_result((*held[:4], held.st_uid + 1, *held[5:10])) if held.st_ino == planted else held

    monkeypatch.setattr("os.stat", of_another)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        own_folder(cache / "kernels" / "version")


def test_kernels_are_compiled_into_such_a_folder(cache):
    pytest.importorskip("numba")
    from specscope.kernels.cpu.team import machine_code

    def nothing(value):
        pass

    before = os.umask(0)
    try:
        machine_code(nothing, 1)
    finally:
        os.umask(before)
    (version,) = (cache / "kernels").iterdir()
    assert list(version.rglob("*.nbc"))
    assert stat.S_IMODE(version.stat().st_mode) == 0o700
