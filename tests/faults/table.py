"""What diagnose says of every planted fault: `python -m tests.faults.table [NAME ...]` prints it, and without names
writes it to README.md beside this file.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from specscope.analyze.diagnose.diagnosis import Diagnosis
from specscope.analyze.diagnose.hypotheses import diagnose
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, history, record


def diagnosed(name: str, folder: Path) -> Diagnosis:
    """A fault's run, recorded and judged."""
    fault = FAULTS[name]
    return diagnose(history(record(SETTINGS[fault.setting], folder / f"{name.replace(' ', '_')}.jsonl", fault)))


def main() -> None:
    names = sys.argv[1:] or list(FAULTS)
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            start = time.perf_counter()
            found = diagnosed(name, Path(folder)).suspects
            fault = FAULTS[name]
            first = found[0].cause if found else None
            right += first is fault.cause
            mark = "ok " if first is fault.cause else "-- "
            print(f"{mark} {name} [{fault.cause.label}] {time.perf_counter() - start:.1f}s")
            for one in found[: 4 if first is not fault.cause or len(names) < 4 else 1]:
                print(f"      {one.score:.2f} {one.cause.label}: {'; '.join(one.for_)} {one.against or ''}", flush=True)
        print(f"{right} of {len(names)}")


if __name__ == "__main__":
    main()
