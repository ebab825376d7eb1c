"""A benchmark's children find its modules from any folder, although no child looks in the current one."""

import os
import subprocess

from benchmarks.terminal import module


def test_a_module_runs_from_any_folder(tmp_path):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        module("benchmarks.paired", "--help"), cwd=tmp_path, env=kept | {"PYTHONSAFEPATH": "1"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
