"""`python -m benchmarks attach`: whether the screen keeps up with an engine elsewhere, and answers keys meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.progress import Progress

from benchmarks.terminal import Terminal, module
from specscope.errors import UserError
from specscope.terminal import text_console
from specscope.trace.history.history import History
from specscope.trace.record.records import StepRecord
from specscope.trace.wire.reading import read_capture

REQUESTS, BATCH, RATE = 64, 4, 200  # requests at once, of which a step has so many; steps a second
SLOWEST = 100  # ms from a key to the screen, for 95 % of keys
KEY, ANSWER, CLOSE = "v", b"one column per step", "\x1b"


def run_attach(sample: str, seconds: int) -> None:
    """Measure and print. `sample` is a capture whose steps are sent again and again."""
    console = text_console()
    read_capture(sample)  # a bad file is said at once
    terminal = Terminal([sys.executable, "-P", "-m", "specscope", "watch", "--listen", "127.0.0.1:43170"])
    if terminal.wait_for(lambda shown: b"listening on" in shown, 30) is None:
        raise UserError("the screen did not come up")
    sender = subprocess.Popen(module("benchmarks.attach", sample, str(seconds)), stdout=subprocess.PIPE, text=True)
    memory: list[float] = []
    latencies: list[float] = []
    began = time.perf_counter()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("sending", total=seconds)
        while sender.poll() is None:
            passed = time.perf_counter() - began
            bar.update(task, completed=passed)
            memory.append(_memory(terminal.child.pid))
            if passed > 3:
                latencies.append(_press(terminal))
            _wait(terminal, 0.4)
    assert sender.stdout is not None
    said = json.loads(sender.stdout.read() or "{}")
    terminal.press("q")
    terminal.finish()
    if not latencies or not said:
        raise UserError("nothing was measured: send for longer")
    latencies.sort()
    worst = latencies[int(len(latencies) * 0.95)]
    console.print(f"{said['steps']:,} steps sent, {said['rate']:.0f} a second; {said['failed']} failed")
    console.print(
        f"key to screen: median {median(latencies) * 1e3:.0f} ms, 95 % below {worst * 1e3:.0f} ms "
        f"(goal: below {SLOWEST}), {len(latencies)} presses"
    )
    console.print(f"memory: {memory[len(memory) // 4]:.0f} MB after a quarter, {memory[-1]:.0f} MB at the end")


def _press(terminal: Terminal) -> float:
    """Seconds from a key to what it opens."""
    terminal.shown = b""
    start = time.perf_counter()
    terminal.press(KEY)
    while ANSWER not in terminal.shown and time.perf_counter() - start < 5:
        terminal._read()
    took = time.perf_counter() - start
    terminal.press(CLOSE)
    return took


def _wait(terminal: Terminal, seconds: float) -> None:
    """Go on reading what the screen draws."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        terminal._read()


def _memory(process: int) -> float:
    """Resident megabytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def busy_steps(history: History) -> Iterator[StepRecord]:
    """Steps without end: parts of the sample's, dealt out to REQUESTS requests, BATCH in each step."""
    parts = itertools.cycle([part for step in history.steps for part in step.requests])
    info = next(info for step in history.steps for info in step.admitted)
    phases = history.steps[0].phases
    index = dict.fromkeys(range(REQUESTS), 0)
    for number in itertools.count():
        now, first = time.time_ns(), number * BATCH % REQUESTS
        chosen = [first + i for i in range(BATCH)]
        fresh = [i for i in chosen if index[i] == 0]
        taken = [dataclasses.replace(next(parts), request=f"r{i}", index=index[i]) for i in chosen]
        for i in chosen:
            index[i] += 1
        yield dataclasses.replace(
            history.steps[0],
            step=number,
            phases=tuple(dataclasses.replace(phase, start_ns=now, end_ns=now + 1_000_000) for phase in phases),
            running=BATCH,
            admitted=tuple(dataclasses.replace(info, id=f"r{i}") for i in fresh),
            requests=tuple(taken),
            preempted=(),
            finished=(),
            passes=(),
        )


def send(sample: str, seconds: float) -> None:
    """The sender's process: RATE steps a second, as an engine would send them."""
    from specscope.trace.wire.sending import Sender, SpanSink
    from specscope.trace.wire.spans import SpanLevel

    history = read_capture(sample).history
    assert history.run is not None
    sink = SpanSink(Sender("http://127.0.0.1:43170", "grpc"), history.run, history.vocabulary, SpanLevel.TREES)
    began, count = time.perf_counter(), 0
    for record in busy_steps(history):
        due = began + count / RATE
        if due - began > seconds:
            break
        time.sleep(max(due - time.perf_counter(), 0))
        sink(record)
        count += 1
    took = time.perf_counter() - began
    sink.close()
    print(json.dumps({"steps": count, "rate": count / took, "failed": "; ".join(sink.losses()) or "no spans"}))


if __name__ == "__main__":
    send(sys.argv[1], float(sys.argv[2]))
