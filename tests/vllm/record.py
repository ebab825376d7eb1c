"""Records planted.RUNS with the real vLLM: `SPECSCOPE_VLLM_PYTHON=... python -m tests.vllm.record FOLDER [NAME ...]`.

Each run becomes FOLDER/NAME.jsonl, and what vLLM gave FOLDER/NAME.json. Not a test.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from tests.vllm.planted import ENGINES, HERE, RUNS, Run, file_name


def clean_environment(**variables: str) -> dict[str, str]:
    """Of a vLLM that the tests start: no setting of the plugin but these."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")} | variables


def record(folder: Path, runs: Iterable[Run], python: str, *, plugin: bool = True) -> None:
    """All of them, an engine after the other. Without the plugin there are no captures."""
    for name, own in groupby(sorted(runs, key=lambda run: run.engine), lambda run: run.engine):
        known = "2000" if ENGINES[name].is_bundled else "74"
        job = ENGINES[name].job() | {"runs": [run.job() for run in own]}
        run_inside(folder, job, python, f"{name.replace(' ', '-')}.log", plugin=plugin, FAULT_KNOWN=known)


def start(
    folder: Path, job: dict[str, Any], python: str, log: IO[str], out: int | IO[str], **variables: str
) -> subprocess.Popen[str]:
    """inside.py with a job, in a folder that it writes to. `log`, `out`: where its errors and its output go."""
    (folder / "job.json").write_text(json.dumps(job))
    command = [python, "-P", str(HERE / "inside.py"), str(folder / "job.json"), str(folder)]
    return subprocess.Popen(command, env=clean_environment(**variables), stdout=out, stderr=log, text=True)


def run_inside(
    folder: Path, job: dict[str, Any], python: str, log_name: str = "vllm.log", *, plugin: bool = True, **more: str
) -> None:
    """Run a job of inside.py; what it writes is moved to a folder as it comes, so that a fault leaves the rest."""
    with tempfile.TemporaryDirectory() as work, open(folder / log_name, "w") as log:
        more |= {"SPECSCOPE_CAPTURE": f"{work}/run.jsonl"} if plugin else {}
        with start(Path(work), job, python, log, subprocess.PIPE, **more) as process:
            for line in process.stdout or ():
                log.write(line)
                if line.startswith("ran "):
                    name, status = line.split()[1].rstrip(":"), line.split()[-1]
                    print(line.strip(), flush=True)
                    for written in Path(work).glob(f"{name}.json*"):
                        os.replace(written, folder / written.name)
                    assert status == "0", f"{name} failed: see {log.name}"
        assert process.returncode == 0, f"vLLM failed: see {log.name}"


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    record(folder, [run for run in RUNS if not names or file_name(run) in names], os.environ["SPECSCOPE_VLLM_PYTHON"])


if __name__ == "__main__":
    main()
