"""Others that keep the processors busy are seen, and folders of the cache are for their user alone."""

import os
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from specscope.user_cache import Others, own_folder


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


@pytest.mark.parametrize(("own", "parent"), [(0.0, 0.0), (1.5, 0.0), (1.0, 2.0)])
def test_its_own_work_and_its_parents_is_not_others(monkeypatch, own, parent):
    """Of five seconds that processors worked in two, this process had `own`. Its parent may be a screen that starts."""
    times = psutil.cpu_times()
    none = times._replace(**dict.fromkeys(times._fields, 0.0))

    with monkeypatch.context() as patch:

        def clocks(now, all_of_them, mine, parents):
            patch.setattr("time.monotonic", lambda: now)
            patch.setattr("psutil.cpu_times", lambda: none._replace(user=all_of_them, idle=9 * now))
            patch.setattr("os.times", lambda: os.times_result((mine, 0, 0, 0, now)))
            patch.setattr("psutil.Process", lambda pid: SimpleNamespace(cpu_times=lambda: (parents, 0.0)))

        clocks(100.0, 700.0, 30.0, 50.0)
        others = Others()
        clocks(102.0, 705.0, 30.0 + own, 50.0 + parent)
        busy = others.busy()
    assert busy == pytest.approx((5.0 - own - parent) / 2.0)


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
