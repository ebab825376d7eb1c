"""Mistakes, each put alone into a copy of the tree, and the test that must catch it: `python -m tests.mutations`.

With numbers, only those rows are tried.

The rows stand in mutations.toml. Whoever moves the text updates the row; whoever deletes the test names the one that
catches the mistake now. Writes mutations.json where it is started; exits with 1 where one is not caught.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "notes", "scratch")
PASSED, CAUGHT = 0, 1  # pytest's exit codes: all passed, some failed


def rows():
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutation"]


def run_test(tree, test):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(test)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True).returncode


def tried(tree, row):
    """What became of a mistake: caught, or why not."""
    path = tree / row["file"]
    text = path.read_text() if path.exists() else ""
    if text.count(row["text"]) != 1:
        return "the text is not there once: update the row"
    if (code := run_test(tree, row["test"])) != PASSED:
        return f"without the mistake the test does not pass (pytest says {code}): update the row"
    before = path.stat()
    path.write_text(text.replace(row["text"], row["mistake"]))
    os.utime(path, (before.st_atime, before.st_mtime + 10))  # what was compiled before is not for this text
    code = run_test(tree, row["test"])
    path.write_text(text)
    os.utime(path, (before.st_atime, before.st_mtime))
    return "caught" if code == CAUGHT else "not caught" if code == PASSED else f"not run (pytest says {code})"


def run(numbers, out):
    """Try the rows of these numbers, from 1 on, or all; how many were not caught."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        for number, row in enumerate(rows(), 1):
            if not numbers or number in numbers:
                began = time.monotonic()
                found.append({"number": number, **row, "result": tried(tree, row)})
                print(
                    f"{number:>2} {row['file']}: {found[-1]['result']} ({time.monotonic() - began:.0f} s)", flush=True
                )
                out.write_text(json.dumps({"mutations": found}, indent=1) + "\n")
    return sum(one["result"] != "caught" for one in found)


if __name__ == "__main__":
    sys.exit(run([int(word) for word in sys.argv[1:]], Path("mutations.json")) > 0)
