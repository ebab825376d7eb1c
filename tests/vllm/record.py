"""Records planted.RUNS with the real vLLM: `SPECSCOPE_VLLM_PYTHON=... python -m tests.vllm.record FOLDER [NAME ...]`.

Each run becomes FOLDER/NAME.jsonl, and FOLDER/index.json tells of all that are there. Not a test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from specscope.measure.prompts import COPYING, PLAIN
from tests.faults.models import story
from tests.vllm.planted import ENGINES, HERE, RUNS, Run


def file_name(run: Run) -> str:
    """Of its capture, without the ending."""
    return run.name.replace(" ", "-")


def told(run: Run) -> dict:
    """For many.py."""
    prompts = [story(10**7 + at, run.prompt) for at in range(run.requests)]
    if run.engine.startswith("default"):
        prompts = [*PLAIN, *COPYING][: run.requests]
    seeded = run.params.get("temperature", 0) > 0
    params = [
        {"temperature": 0, "max_tokens": run.tokens, "ignore_eos": True, "seed": at + 1 if seeded else None}
        | run.params
        for at in range(run.requests)
    ]
    return {"name": file_name(run), "faults": list(run.faults), "prompts": prompts, "params": params}


def record(folder: Path, runs: Iterable[Run], python: str) -> None:
    """All of them, an engine after the other."""
    by_engine: dict[str, list[Run]] = {}
    for run in runs:
        by_engine.setdefault(run.engine, []).append(run)
    for name, own in by_engine.items():
        speculation, options = ENGINES[name]
        with tempfile.TemporaryDirectory() as work:
            jobs = {
                "model": str(own[0].target),
                "speculation": speculation,
                "engine": options,
                "runs": list(map(told, own)),
            }
            (Path(work) / "jobs.json").write_text(json.dumps(jobs))
            environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECSCOPE_")}
            environment |= {
                "SPECSCOPE_CAPTURE": f"{work}/run.jsonl",
                "FAULT_KNOWN": "2000" if name.startswith("default") else "74",
            }
            command = [python, "-P", str(HERE / "many.py"), f"{work}/jobs.json", work]
            with open(folder / f"{name.replace(' ', '-')}.log", "w") as log:
                process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    if line.startswith("ran "):
                        ran = line.split()[1].rstrip(":")
                        print(line.strip(), flush=True)
                        if (capture := Path(work) / f"{ran}.jsonl").exists():
                            os.replace(capture, folder / f"{ran}.jsonl")
                        write_index(folder)
                        assert line.split()[-1] == "0", f"{ran} failed: see {log.name}"
                assert process.wait() == 0, f"vLLM failed: see {log.name}"


def write_index(folder: Path) -> None:
    """Of the runs whose captures are there; whole at any time."""
    rows = [
        {
            "name": file_name(run),
            "file": f"{file_name(run)}.jsonl",
            "kind": "fault" if run.right or run.proposed else "healthy",
            "about": run.about,
            "right": list(run.right),
            "proposed": run.proposed,
            "target": str(run.target),
            "draft": None if run.draft is None else str(run.draft),
        }
        for run in RUNS
        if (folder / f"{file_name(run)}.jsonl").exists()
    ]
    (folder / ".index.json").write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(folder / ".index.json", folder / "index.json")


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    record(folder, [run for run in RUNS if not names or file_name(run) in names], os.environ["SPECSCOPE_VLLM_PYTHON"])


if __name__ == "__main__":
    main()
