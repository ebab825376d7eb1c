"""The command line, in this process or as people run it."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specscope import __main__ as program
from tests.waiting import HANG_SECONDS


def run_here(words):
    """(exit code, stdout, stderr) of the command in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["specscope", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            program.main()
    finally:
        sys.argv = before
    return ended.value.code, out.getvalue(), err.getvalue()


def said(words, code=0):
    """(stdout, stderr) of the command in this process, which ends with this code."""
    found, out, err = run_here(words)
    assert found == code, out + err
    return out, err


@contextlib.contextmanager
def standard_input(given):
    """This process reads a text, or a file, as its descriptor and as its stream."""
    kept, before = os.dup(0), sys.stdin
    with given.open() if isinstance(given, Path) else tempfile.TemporaryFile("w+") as file:
        if isinstance(given, str):
            file.write(given)
            file.seek(0)
        os.dup2(file.fileno(), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        try:
            yield
        finally:
            sys.stdin = before
            os.dup2(kept, 0)
            os.close(kept)


def specscope(*words, stdin="", **environment):
    """The command in this process, as subprocess.run tells of it: torch is imported once for all tests."""
    words = list(map(str, words))
    with pytest.MonkeyPatch.context() as patch, standard_input(stdin):
        for name, value in {"COLUMNS": "100", **environment}.items():
            patch.setenv(name, value)
        return subprocess.CompletedProcess(words, *run_here(words))


def run_apart(words):
    """The same in a process of its own, as people run it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "specscope", *words], capture_output=True, env=env, timeout=HANG_SECONDS, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()
