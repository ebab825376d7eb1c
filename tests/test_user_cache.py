"""Folders of the cache are for their user alone."""

import os
import stat

import pytest

from specscope.user_cache import own_folder


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
