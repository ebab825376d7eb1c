"""A long capture: it is exported in a minute of a processor's time, and its records are not kept."""

import subprocess
import sys
import weakref

import pyarrow.parquet as pq
import pytest

from benchmarks.replay import lengthen
from specscope.analyze.export import exporting
from specscope.analyze.export.exporting import Streamed
from tests.bad_inputs import PLANTED

STEPS, MEGABYTES = 100_000, 1000
SECONDS = 600  # of processor time: ten times what it takes; a look at all steps for each would take days
MEASURED = """
import resource, sys
from pathlib import Path
from specscope.analyze.export.exporting import export
export([sys.argv[1]], sys.argv[2])
used = resource.getrusage(resource.RUSAGE_SELF)  # its ru_maxrss would be the parent's, where that was larger
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(used.ru_utime + used.ru_stime, int(peak.split()[1]) / 1024)
"""


def measured(capture, folder):
    """(seconds, peak MB) of an export in a process of its own. Seconds of processor time: others may run beside it."""
    done = subprocess.run([sys.executable, "-c", MEASURED, capture, folder], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


@pytest.mark.slow
def test_a_hundred_thousand_steps(tmp_path):
    lengthen(PLANTED, tmp_path / "long.jsonl", STEPS)
    seconds, megabytes = measured(str(tmp_path / "long.jsonl"), str(tmp_path / "tables"))
    assert pq.read_metadata(tmp_path / "tables" / "steps.parquet").num_rows == STEPS
    assert seconds < SECONDS
    assert megabytes < MEGABYTES


def test_records_are_let_go(tmp_path, monkeypatch):
    """Of two thousand no more are held at any time than a few lines of the capture have."""
    held, most = 0, 0

    def gone():
        nonlocal held
        held -= 1

    class Counting(Streamed):
        def append(self, record):
            nonlocal held, most
            held += 1
            most = max(most, held)
            weakref.finalize(record, gone)
            super().append(record)

    monkeypatch.setattr(exporting, "Streamed", Counting)
    lengthen(PLANTED, tmp_path / "long.jsonl", 2000)
    written = exporting.export([str(tmp_path / "long.jsonl")], str(tmp_path / "tables"))
    assert written.rows["steps"] == 2000
    assert 0 < most < 100
    assert held <= 1
