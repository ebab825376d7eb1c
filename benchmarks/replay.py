"""`python -m benchmarks replay`: how soon a 10,000-step capture is on the screen, and what it takes."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path

from rich.table import Table

from benchmarks.terminal import Terminal
from specscope.errors import UserError
from specscope.terminal import text_console
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture

STEPS = 10_000
FIRST_SCREEN = 1.5  # seconds, at most
MEMORY = 500  # MB, at most


def run_replay(sample: str, rounds: int, steps: int = STEPS) -> None:
    """Measure and print. `sample` is a capture whose steps are repeated to make a long one."""
    console = text_console()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.jsonl"
        with console.status(f"writing {steps:,} steps"):
            lengthen(sample, path, steps)
        size = path.stat().st_size / 1e6
        table = Table(
            title=f"specscope open of {steps:,} steps, {size:.0f} MB", title_justify="left", title_style="dim"
        )
        for column in ("round", "first screen, s", "all read, s", "peak memory, MB", "torch loaded"):
            table.add_column(column, justify="right")
        for number in range(rounds):
            with console.status("replaying"):
                table.add_row(str(number + 1), *_measure(path))
        console.print(table)
        console.print(
            f"goal at {STEPS:,} steps: first screen below {FIRST_SCREEN} s, memory below {MEMORY} MB, no torch",
            style="dim",
        )


def lengthen(sample: str, path: Path, steps: int) -> None:
    """Write a capture of so many steps: those of `sample` again and again, requests renamed each time."""
    history = read_capture(sample).history
    assert history.run is not None
    if not history.steps:
        raise UserError(f"{sample} holds no steps")
    writer = CaptureWriter(path, history.run, history.vocabulary)
    for number, record in zip(range(steps), itertools.cycle(history.steps), strict=False):
        lap = number // len(history.steps)

        def renamed(name: str, lap: int = lap) -> str:
            return f"{name}.{lap}"

        writer(
            dataclasses.replace(
                record,
                step=number,
                admitted=tuple(dataclasses.replace(i, id=renamed(i.id)) for i in record.admitted),
                requests=tuple(dataclasses.replace(p, request=renamed(p.request)) for p in record.requests),
                preempted=tuple(map(renamed, record.preempted)),
                finished=tuple(
                    dataclasses.replace(e, info=dataclasses.replace(e.info, id=renamed(e.info.id)))
                    for e in record.finished
                ),
            )
        )
    writer.close()


def _measure(path: Path) -> tuple[str, str, str, str]:
    terminal = Terminal([sys.executable, "-P", "-m", "specscope", "open", str(path)])
    first = terminal.wait_for(lambda shown: b"root @" in shown or b"accepted" in shown, 60)
    read = terminal.wait_for(lambda shown: "◂▸ replay".encode() in shown, 600)
    if first is None or read is None:
        raise UserError(f"the replay did not show: {terminal.shown[-300:].decode(errors='replace')}")
    process = Path(f"/proc/{terminal.child.pid}")
    peak = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
    torch = "libtorch" in (process / "maps").read_text()
    terminal.press("q")
    terminal.finish()
    return f"{first:.2f}", f"{read:.2f}", f"{int(peak.split()[1]) / 1024:.0f}", "yes" if torch else "no"
