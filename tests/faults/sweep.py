"""Run settings and faults and say what acceptance they have: `python -m tests.faults.sweep [NAME ...]`."""

import sys
import tempfile
import time
from pathlib import Path

from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, history, record


def main() -> None:
    names = sys.argv[1:]
    folder = Path(tempfile.mkdtemp())
    for name, setting in SETTINGS.items():
        if names and name not in names:
            continue
        start = time.perf_counter()
        h = history(record(setting, folder / "h.jsonl"))
        a = h.acceptance
        pre = sum(len(s.preempted) for s in h.steps)
        print(
            f"[{name}] {time.perf_counter() - start:.1f}s steps {a.steps} tau {a.tau or 0:.2f} preempted {pre} "
            f"cond {[round(c, 2) if c is not None else None for c in a.conditional]} kinds {dict(a.kinds)}",
            flush=True,
        )
        for fault in FAULTS.values():
            if fault.setting != name:
                continue
            start = time.perf_counter()
            try:
                a = history(record(setting, folder / "f.jsonl", fault)).acceptance
            except Exception as error:
                print(f"   {fault.name}: {type(error).__name__} {error}")
                raise
            print(
                f"   {fault.name}: {time.perf_counter() - start:.1f}s tau {a.tau or 0:.2f} "
                f"{[round(c, 2) if c is not None else None for c in a.conditional]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
