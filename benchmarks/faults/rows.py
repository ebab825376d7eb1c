"""The rows of `python -m benchmarks faults`: what was found of a planted fault or a healthy run, and what got worse."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specscope.analyze.diagnose.diagnosis import Diagnosis
from specscope.analyze.locate.located import Location
from specscope.errors import UserError

SLOWER = 1.2  # from here on a row has got worse: in processor time, which other programs disturb least
RENAMED: Mapping[str, str] = json.loads((Path(__file__).parents[1] / "notes/house/causes.json").read_text())  # old: new
Row = dict[str, Any]
Key = tuple[str, str]  # the fault or healthy run, and how it was planted


class Clock:
    """Seconds since it was made: by the wall, and of the processor, with those of child processes."""

    def __init__(self) -> None:
        self.wall, self.processor = time.perf_counter(), sum(os.times()[:4])

    def taken(self) -> Row:
        """Both, as a row tells them."""
        return {
            "seconds": round(time.perf_counter() - self.wall, 2),
            "processor": round(sum(os.times()[:4]) - self.processor, 2),
        }


def row_of(
    key: Key, expected: Sequence[str] | None, named: str | None, found: Diagnosis | Location, clock: Clock
) -> Row:
    """What was found, as it is kept. `expected`: the names that would be right; None for a healthy run."""
    place = found.located[0] if found.located else None
    suspects = found.suspects if isinstance(found, Diagnosis) else ()
    return {
        "fault": key[0],
        "how": key[1],
        "expected": None if expected is None else list(expected),
        "named": named,
        "place": None if place is None else f"{place.operation.stage.value}: {place.operation.name}",
        "why": suspects[0].for_[0] if suspects else None,
        "looks": None if place is None else place.looks,
        "unexplained": list(found.unexplained),
        "left_out": list(found.left_out),
        **clock.taken(),
    }


def first_named(found: Diagnosis) -> str | None:
    """The label of the likeliest cause."""
    return found.faults[0].cause.label if found.faults else None


def is_right(row: Row) -> bool:
    """Whether the cause is named first; nothing is said of a healthy run; a fault without a name is seen."""
    if row["expected"] is None:
        return is_silent(row)
    return row["named"] in row["expected"] if row["expected"] else not is_silent(row)


def is_silent(row: Row) -> bool:
    """Whether nothing is said to be wrong."""
    return row["named"] is None and row["place"] is None and not row["unexplained"]


def begin(file: Path) -> None:
    """Begin a file of rows: its first line says where and when they are made."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = {"machine": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    began = time.strftime("%Y-%m-%d %H:%MZ", time.gmtime())
    file.write_text(json.dumps(machine | {"began": began}) + "\n")


def read_rows(file: Path) -> dict[Key, Row]:
    """The rows of a file, packed with gzip or not. Raises UserError."""
    try:
        text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
        rows = [json.loads(line) for line in text.splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    return {(row["fault"], row["how"]): _renamed(row) for row in rows if "fault" in row}


def _renamed(row: Row) -> Row:
    """A row with the names that its causes have today."""
    expected = row["expected"] and [RENAMED.get(name, name) for name in row["expected"]]
    return {**row, "expected": expected, "named": RENAMED.get(row["named"], row["named"])}


def compare(rows: Mapping[Key, Row], old: Mapping[Key, Row]) -> int:
    """Print each row that got worse than it was; how many these are."""
    both = [key for key in rows if key in old]
    if both:
        ratio = median(rows[key]["processor"] / max(old[key]["processor"], 0.1) for key in both)
        print(f"{len(both)} rows beside those of before: {ratio:.2f} times their processor time in the median")
    worse = {key: lost for key in both if (lost := losses(rows[key], old[key]))}
    for (name, how), lost in worse.items():
        print(f"WORSE {name}, {how}: {'; '.join(lost)}")
    return len(worse)


def losses(row: Row, old: Row) -> list[str]:
    """In what a row is worse than it was."""
    lost = []
    if is_right(old) and not is_right(row):
        lost.append(f"named {row['named'] or 'nothing'}, was {old['named'] or 'nothing'}")
    if old["place"] is not None and row["place"] != old["place"]:
        lost.append(f"place {row['place'] or 'lost'}, was {old['place']}")
    if row["processor"] > SLOWER * old["processor"]:
        lost.append(f"{row['processor']:.1f} s of processor, was {old['processor']:.1f}")
    return lost


def summary(rows: Mapping[Key, Row]) -> str:
    """How many faults are named first and located, and how many healthy runs are accused, by how they are planted."""
    lines = []
    for how in dict.fromkeys(how for _, how in rows):
        some = [row for (_, planted), row in rows.items() if planted == how]
        faults = [row for row in some if row["expected"] is not None]
        healthy = [row for row in some if row["expected"] is None]
        parts = [f"{len(faults)} faults, {sum(map(is_right, faults))} named first"] if faults else []
        if faults:
            placed = sum(row["place"] is not None for row in faults)
            parts += [f"{placed} with a place", f"{sum(map(is_silent, faults))} missed"]
        if healthy:
            parts.append(f"{len(healthy)} healthy runs, {sum(not is_right(row) for row in healthy)} accused")
        lines.append(f"{how}: {', '.join(parts)}")
    return "\n".join(lines)


def line(row: Row) -> str:
    """A row in a line."""
    return (
        f"{'ok' if is_right(row) else '--'} {row['fault']}, {row['how']}: {row['named'] or 'nothing named'}; "
        f"{row['place'] or 'no place'}; {row['seconds']:.0f} s ({row['processor']:.1f} s of processor)"
    )
