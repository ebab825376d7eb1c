"""What diagnose says of every planted fault: `python -m tests.faults.table [NAME ...] [--keep FOLDER] [--rare]`.

Without names all faults are planted, all through and rarely, the healthy runs follow, and README.md beside this file is
written anew. The captures are kept in FOLDER, where that is given, and used again. --rare: the named ones rarely.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from specscope.analyze.diagnose.diagnosis import Diagnosis
from specscope.analyze.diagnose.run import examine
from specscope.measure.judges import audit_options
from specscope.trace.wire.reading import read_capture
from tests.faults.healthy import HEALTHY
from tests.faults.models import TARGET
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, SETTINGS, Setting, record

SAMPLE = 400  # steps that are audited
README = Path(__file__).parent / "README.md"
HEAD = """# Planted faults

Each fault is a few lines that a test puts into a running engine over tiny trained models (`planted/`), recorded as any
run is, and judged by `specscope diagnose` with the models at hand. `python -m tests.faults.table` writes this page.

{right} of {total} faults have their cause named first; {missed} missed silently. Planted in a few engine steps alone
(`rare` in `planted/`), {rare_right} of {rare_total} have; {rare_missed} missed silently. Of {healthy} runs without a
fault (`healthy.py`) {alarms} had a cause named.

| fault | what is wrong | run | cause | named first | score | rare: steps, named first | by |
|---|---|---|---|---|---|---|---|
"""


def diagnosed(path: Path, setting: Setting) -> Diagnosis:
    """A capture of the tiny models, judged with them at hand."""
    reader = read_capture(path)
    draft = DRAFTERS[setting.drafter].get("draft_model")
    options = audit_options(reader.history, str(TARGET), draft, SAMPLE)
    return examine(reader.history, str(path), options, warnings=reader.warnings)


def planted(name: str, folder: Path, *, rarely: bool = False) -> Diagnosis:
    """A fault's run, recorded and judged. `rarely`: with the fault in a few of its steps."""
    fault = FAULTS[name]
    setting, path = SETTINGS[fault.setting], folder / f"{name.replace(' ', '_')}{'-rare' * rarely}.jsonl"
    return diagnosed(path if path.exists() else record(setting, path, fault, rarely=rarely), setting)


def is_right(name: str, found: Diagnosis) -> bool:
    """Whether a fault's cause is named first."""
    return bool(found.faults) and found.suspects[0].cause is FAULTS[name].cause


def show(name: str, found: Diagnosis, seconds: float) -> bool:
    """Print what was found of a fault; whether it is right."""
    fault = name.removesuffix(" (rare)")
    right = is_right(fault, found)
    print(f"{'ok' if right else '--'} {name} [{FAULTS[fault].cause.label}] {seconds:.1f} s")
    for one in found.suspects[:4]:
        print(f"      {one.score:.2f} {one.cause.label}: {'; '.join(one.for_)} {'; '.join(one.against)}")
    for line in found.unexplained:
        print("      ?", line)
    sys.stdout.flush()
    return right


def row(name: str, found: Diagnosis, rare: Diagnosis | None) -> str:
    """A line of the table. `rare`: of the run in which it was rare, where it can be."""
    fault, first = FAULTS[name], found.suspects[0] if found.suspects else None
    named = "nothing" if first is None else first.cause.label
    score, why = ("", "") if first is None else (f"{first.score:.2f}", first.for_[0])
    seldom = "" if rare is None else f"{fault.rare}, {rare.suspects[0].cause.label if rare.suspects else 'nothing'}"
    cells = (name, fault.about, fault.setting, fault.cause.label, named, score, seldom, why)
    return "| " + " | ".join(cell.replace("|", "or") for cell in cells) + " |\n"


def alarms(folder: Path) -> int:
    """How many of the healthy runs have a cause named."""
    count = 0
    for name, setting in HEALTHY.items():
        found = diagnosed(record(setting, folder / "healthy.jsonl"), setting)
        if found.faults or found.unexplained:
            print("ALARM", name, found.faults, found.unexplained)
            count += 1
    return count


def is_silent(found: Diagnosis) -> bool:
    """Whether nothing is said to be wrong."""
    return not (found.faults or found.unexplained)


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:]
    kept = Path(names.pop(names.index("--keep") + 1)) if "--keep" in names else None
    rarely, names = "--rare" in names, [name for name in names if not name.startswith("--")]
    found, seldom = dict[str, Diagnosis](), dict[str, Diagnosis]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names or FAULTS:
            for rare, diagnoses in ((False, found), (True, seldom)):
                if (rare and not FAULTS[name].rare) or (names and rare != rarely):
                    continue
                start = time.perf_counter()
                diagnoses[name] = planted(name, kept or Path(folder), rarely=rare)
                show(name + " (rare)" * rare, diagnoses[name], time.perf_counter() - start)
        right, rare_right = (sum(is_right(name, one) for name, one in each.items()) for each in (found, seldom))
        print(f"{right} of {len(found)}, rare {rare_right} of {len(seldom)}")
        if not names:
            counts = {
                "right": right,
                "total": len(found),
                "missed": sum(map(is_silent, found.values())),
                "rare_right": rare_right,
                "rare_total": len(seldom),
                "rare_missed": sum(map(is_silent, seldom.values())),
                "healthy": len(HEALTHY),
            }
            rows = [row(name, one, seldom.get(name)) for name, one in found.items()]
            README.write_text(HEAD.format(**counts, alarms=alarms(Path(folder))) + "".join(rows))


if __name__ == "__main__":
    main()
