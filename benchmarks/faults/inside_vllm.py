"""`python -m benchmarks faults DIR --vllm PYTHON`: the faults of tests/vllm, planted into the real vLLM.

Of recorded runs `diagnose` names the cause; of a vLLM that runs again with a fault `locate` names class and method. The
captures are kept in DIR/vllm, where a later run finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.rows import Clock, Key, Row, first_named, row_of
from tests.vllm.planted import FAULTY, RUNS, Run, file_name
from tests.vllm.record import record
from tests.vllm.test_real import diagnosed
from tests.vllm.test_real_locate import ENGINES, PLANTED, located, recorded

NAMED, LOCATED = "vllm", "vllm located"
CHUNKS = "eagle chunks"  # the engine with vLLM's own fault: it is not healthy


def cases(python: str) -> Mapping[Key, Callable[[Path], Row]]:
    """What judges each row; those of one engine stand together."""
    planted = [(fault, engine, code) for fault, engine, _, _, code in PLANTED]
    planted += [(None, engine, "") for engine in ENGINES if engine != CHUNKS]
    where = {
        (f"{fault or 'healthy'}, {engine}", LOCATED): partial(_located, fault, engine, code)
        for fault, engine, code in planted
    }
    by_engine = sorted(RUNS, key=lambda run: run.engine)
    return where | {(run.name, NAMED): partial(_named, run, python) for run in by_engine}


def _located(fault: str | None, engine: str, code: str, folder: Path) -> Row:
    """vLLM again with a fault, or healthy. It is named where class and method are the right ones."""

    def capture(name: str) -> Any:  # noqa: ANN401
        return recorded(name, folder / "vllm" / "located")

    capture(engine)
    clock = Clock()
    found = located(capture, engine, [] if fault is None else [fault])
    first = found.located[0].operation.code if found.located else None
    named = code if first is not None and code and code in first else first
    return row_of((f"{fault or 'healthy'}, {engine}", LOCATED), None if fault is None else [code], named, found, clock)


def _named(run: Run, python: str, folder: Path) -> Row:
    """A recorded run, judged by its capture. Where it is not there, all runs of its engine are recorded."""
    captures = folder / "vllm"
    capture = captures / f"{file_name(run)}.jsonl"
    if not capture.exists():
        captures.mkdir(exist_ok=True)
        record(captures, [other for other in RUNS if other.engine == run.engine], python)
    clock = Clock()
    found = diagnosed(run, capture)
    expected = run.right if run in FAULTY else None
    return row_of((run.name, NAMED), expected, first_named(found), found, clock)
