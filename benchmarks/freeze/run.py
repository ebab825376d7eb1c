"""`python -m benchmarks freeze`: every row of results.py over every capture and input, written to a folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import specscope
from benchmarks.freeze.results import Result, differences, results_of
from specscope.errors import UserError
from specscope.terminal import text_console

TRACES = Path(__file__).parents[2] / "tests/data/samples"  # as 5301d291 had them: results stay comparable
# `capture` and `tree` read these, and people
SUFFIXES = (".py", ".sh", ".md", ".png", ".svg", ".csv", ".yaml")
PROMPTS = ("sharegpt.json", "specbench.jsonl", "speedbench.jsonl", "mtbench_hf.jsonl", "specforge_regenerated.jsonl")
NO_INPUTS = {*PROMPTS, "samd_tree.json", "prompts"}  # names of files and folders
WORKERS = 2
FIXED_NS = 1_767_225_600 * 10**9  # when every input was written last: 2026-01-01
ENVIRONMENT = {"TZ": "UTC", "COLUMNS": "120", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def run_freeze(folder: str, cases: str, against: str | None) -> int:
    """Write what the verbs say to a folder, and what differs from `against`; the exit code."""
    console, began = text_console(), time.monotonic()
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise UserError(f"{folder} is not empty: give a new folder")
    old = None if against is None else read_frozen(Path(against))
    console.print(f"specscope at {Path(str(specscope.__file__)).parent}")
    frozen = freeze(TRACES, Path(cases), console.print)
    write_frozen(Path(folder), frozen)
    console.print(f"{len(frozen)} inputs in {time.monotonic() - began:.0f} s, written to {folder}")
    if old is None:
        return 0
    found = list(differences(old, frozen))
    for line in found:
        print(line)
    print(f"{len(found)} differences from {against}" if found else f"no difference from {against}")
    return 1 if found else 0


def freeze(traces: Path, cases: Path, tell: Callable[[str], None]) -> dict[str, Result]:
    """What every row gives of every input, by the input's path."""
    if not cases.is_dir():
        raise UserError(f"no folder {cases}: give --cases FOLDER")
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as place:
        chosen = [path for root, name in ((traces, "traces"), (cases, "cases")) for path in _copy(root, place, name)]
        following = [
            after if after is not None and Path(after).parent == Path(path).parent else None
            for path, after in zip(chosen, [*chosen[1:], None], strict=True)
        ]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(WORKERS, spawn, os.chdir, (place,)) as pool:
            found = dict[str, Result]()
            for path, results in zip(chosen, pool.map(results_of, chosen, following), strict=True):
                found[path] = results
                codes = ", ".join(f"{name} {result['exit']}" for name, result in found[path].items())
                tell(f"{path}: {codes}")
            return found


def _copy(root: Path, place: str, name: str) -> list[str]:
    """Copy a folder's inputs, all written at the same time; their paths, in order."""
    paths = list[str]()
    for source in sorted(root.rglob("*")):
        inside = source.relative_to(root)
        if source.is_dir() or source.suffix in SUFFIXES or NO_INPUTS.intersection(inside.parts):
            continue
        copy = Path(place) / name / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        os.utime(copy, ns=(FIXED_NS, FIXED_NS))
        paths.append(str(Path(name) / inside))
    return sorted(paths, key=lambda path: (str(Path(path).parent), path))


def write_frozen(folder: Path, frozen: Mapping[str, Result]) -> None:
    """A file for each input."""
    for path, results in frozen.items():
        file = folder / f"{path}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_frozen(place: Path) -> dict[str, Result]:
    """Such a folder, or a .tar of one, compressed or not. Raises UserError."""
    if place.is_dir():
        files = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*.json")}
    elif place.is_file():
        with tarfile.open(place) as archive:
            found = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
            files = {name: file.read().decode() for name, file in found.items() if file is not None}
    else:
        raise UserError(f"no frozen results at {place}")
    return {str(Path(name)).removesuffix(".json"): json.loads(text) for name, text in sorted(files.items())}
