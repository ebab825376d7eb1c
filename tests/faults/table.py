"""What diagnose says of every planted fault: `python -m tests.faults.table [NAME ...]`.

Without names all faults are planted, and the table is written to README.md beside this file. With --keep FOLDER the
captures are kept there, and used again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from specscope.analyze.diagnose.diagnosis import Diagnosis
from specscope.analyze.diagnose.run import examine
from specscope.cli.audit import audit_options
from specscope.trace.reading import read_capture
from tests.faults.models import TARGET
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, SETTINGS, Setting, record

SAMPLE = 400  # steps that are audited


def diagnosed(path: Path, setting: Setting) -> Diagnosis:
    """A capture of the tiny models, judged with them at hand."""
    reader = read_capture(path)
    draft = DRAFTERS[setting.drafter].get("draft_model")
    options = audit_options(reader.history, str(TARGET), draft, SAMPLE)
    return examine(reader.history, str(path), options, warnings=reader.warnings)


def planted(name: str, folder: Path) -> Diagnosis:
    """A fault's run, recorded and judged."""
    fault = FAULTS[name]
    setting, path = SETTINGS[fault.setting], folder / f"{name.replace(' ', '_')}.jsonl"
    return diagnosed(path if path.exists() else record(setting, path, fault), setting)


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:]
    kept = Path(names.pop(names.index("--keep") + 1)) if "--keep" in names else None
    names = [name for name in names if name != "--keep"]
    right, lines = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or FAULTS:
            start = time.perf_counter()
            found = planted(name, kept or Path(folder))
            suspects, fault = found.suspects, FAULTS[name]
            first = suspects[0].cause if suspects else None
            right += first is fault.cause
            print(
                f"{'ok ' if first is fault.cause else '-- '} {name} [{fault.cause.label}] "
                f"{time.perf_counter() - start:.1f}s"
            )
            for one in suspects[:4]:
                print(f"      {one.score:.2f} {one.cause.label}: {'; '.join(one.for_)} {one.against or ''}")
            for line in found.unexplained:
                print("      ?", line)
            sys.stdout.flush()
            lines.append((name, fault, found))
    print(f"{right} of {len(lines)}")


if __name__ == "__main__":
    main()
