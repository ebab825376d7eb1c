"""`python -m benchmarks faults DIR`: what `diagnose`, with `locate`, says of every planted fault and of healthy runs.

A fault is planted into the engine that records and into each engine that `locate` builds: always, and in a few engine
steps alone. Each row is appended to DIR/faults.jsonl as it ends, so a run that is stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from benchmarks.faults.rows import Clock, Key, Row, begin, compare, first_named, line, read_rows, row_of, summary
from specscope.errors import UserError
from tests.faults.fault import in_every_engine
from tests.faults.healthy import HEALTHY
from tests.faults.judged import diagnosed
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, plant, record

ALWAYS, RARELY, HEALTHY_RUN = "always", "rarely", "healthy"
Judge = Callable[[Path], Row]  # given a folder that lasts as long as the rows


def run_faults(folder: Path, names: Sequence[str], old: Path | None, vllm: str | None) -> int:
    """Run the rows that are not there yet; how many of all got worse than those of `old`. Raises UserError."""
    torch.set_num_threads(1)
    os.nice(max(0, 10 - os.nice(0)))
    before = {} if old is None else read_rows(old)
    cases = _chosen(_own() if vllm is None else _of_vllm(vllm), names)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "faults.jsonl"
    if not file.exists():
        begin(file)
    there = read_rows(file)
    with file.open("a") as out:
        for key, judge in cases.items():
            if key not in there:
                there[key] = row = judge(folder)
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(line(row), flush=True)
    rows = {key: there[key] for key in cases}
    print(summary(rows))
    return compare(rows, before)


def _chosen(cases: Mapping[Key, Judge], names: Sequence[str]) -> Mapping[Key, Judge]:
    known = {name for name, _ in cases}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no such fault or healthy run: {', '.join(unknown)}")
    return {key: judge for key, judge in cases.items() if not names or key[0] in names}


def _own() -> dict[Key, Judge]:
    """The rows of our own engine."""
    keys = [(name, ALWAYS) for name in FAULTS]
    keys += [(name, RARELY) for name, fault in FAULTS.items() if fault.rare]
    keys += [(name, HEALTHY_RUN) for name in HEALTHY]
    return {key: partial(judged, *key) for key in keys}


def _of_vllm(python: str) -> Mapping[Key, Judge]:
    os.environ["SPECSCOPE_VLLM_PYTHON"] = python  # read where the tests are imported
    from benchmarks.faults.inside_vllm import cases

    return cases(python)


def judged(name: str, how: str, folder: Path) -> Row:
    """Record a run with a fault, or a healthy one, and say what is found."""
    path, rarely = folder / "run.jsonl", how == RARELY
    if how == HEALTHY_RUN:
        fault, setting, planted = None, HEALTHY[name], nullcontext()
    else:
        fault = FAULTS[name]
        setting, planted = SETTINGS[fault.setting], in_every_engine(partial(plant, fault=fault, rarely=rarely))
    record(setting, path, fault, rarely=rarely)
    clock = Clock()
    with planted:
        found = diagnosed(path, setting, place=True)
    return row_of((name, how), None if fault is None else [fault.cause.label], first_named(found), found, clock)
