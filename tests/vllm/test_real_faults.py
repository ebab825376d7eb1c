"""Faults planted in the real vLLM at run time, each named first by `diagnose`; healthy runs, of which none is accused.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_faults.py

An engine runs all that is planned for it when the first of its runs is asked for.
"""

from __future__ import annotations

import os

import pytest

from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import Exit
from specscope.measure.judges import audit_options
from specscope.trace.wire.reading import read_capture
from tests.vllm.planted import FAULTY, HEALTHY, RUNS
from tests.vllm.record import file_name, record

PYTHON = os.environ.get("SPECSCOPE_VLLM_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]


@pytest.fixture(scope="session")
def captures(tmp_path_factory):
    """Gives a run's capture."""
    folder, ran = tmp_path_factory.mktemp("captures"), set()

    def of(run):
        if run.engine not in ran:
            ran.add(run.engine)
            record(folder, [other for other in RUNS if other.engine == run.engine], PYTHON)
        return folder / f"{file_name(run)}.jsonl"

    return of


def diagnosed(run, capture):
    reader = read_capture(capture)
    assert not [line for line in reader.warnings if "left out" in line]
    options = audit_options(reader.history, str(run.target), None if run.draft is None else str(run.draft), 1000)
    return examine(reader.history, "run", options, warnings=reader.warnings)


def ids(runs):
    return [file_name(run) for run in runs]


@pytest.mark.parametrize("run", FAULTY, ids=ids(FAULTY))
def test_a_fault_in_vllm_is_named_first(captures, run):
    found = diagnosed(run, captures(run))
    labels = [suspect.cause.label for suspect in found.suspects]
    if run.subtle:
        assert set(labels[:1]) <= set(run.right)  # not seen, or rightly named
        return
    assert found.exit is Exit.INCONSISTENT
    if run.right:  # for some there is no name yet, and they are seen all the same
        assert labels, found.unexplained
        assert labels[0] in run.right


@pytest.mark.parametrize("run", HEALTHY, ids=ids(HEALTHY))
def test_a_healthy_vllm_is_not_accused(captures, run):
    found = diagnosed(run, captures(run))
    assert (list(found.faults), found.unexplained) == ([], ())
    assert found.exit is not Exit.INCONSISTENT
