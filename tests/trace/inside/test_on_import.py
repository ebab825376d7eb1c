import importlib.util
import multiprocessing
import subprocess
import sys

import pytest

from specscope.trace.inside.on_import import at_exit, on_import
from tests.waiting import HANG_SECONDS


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that has not been imported."""
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "late_module"
    sys.modules.pop("late_module", None)


def test_the_hook_is_called_when_the_module_has_run_and_not_when_it_is_looked_up(module):
    """Tools look one up to see whether it is there, or to read its source."""
    seen, later = [], []
    on_import(module, lambda one: seen.append(one.value))
    for _ in range(2):
        spec = importlib.util.find_spec(module)
        assert spec.loader.get_source(module) == "value = 1\n"
    assert seen == []
    import late_module  # type: ignore[import-not-found]

    assert seen == [1]
    assert late_module.__spec__.loader.get_source(module) == "value = 1\n"
    on_import(module, later.append)  # of one that is there, at once
    assert later == [late_module]


def test_other_modules_are_found_as_ever(module, tmp_path):
    on_import("a_module_that_never_comes", lambda one: pytest.fail("not asked for"))
    (tmp_path / "another_late.py").write_text("value = 2\n")
    import another_late  # type: ignore[import-not-found]

    assert another_late.value == 2
    del sys.modules["another_late"]


def leave(path):
    """What a process does that is to write a line when it ends."""
    with path.open("a") as file:
        file.write("runs\n")
    at_exit(lambda: path.write_text(path.read_text() + "ends\n"))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_runs_it_once_when_it_ends(method, tmp_path):
    process = multiprocessing.get_context(method).Process(target=leave, args=(tmp_path / "log",))
    process.start()
    process.join(HANG_SECONDS)
    assert (tmp_path / "log").read_text() == "runs\nends\n"


def test_so_does_a_process_of_its_own(tmp_path):
    code = "import pathlib, sys; from tests.trace.inside.test_on_import import leave; leave(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], check=True, timeout=HANG_SECONDS)
    assert (tmp_path / "log").read_text() == "runs\nends\n"
