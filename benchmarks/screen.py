"""The child of `python -m benchmarks observe`: a worker with and without the live screen, on a terminal of its own."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from benchmarks.observe import TOKENS, prompts_of
from benchmarks.paired import process_seconds
from specscope.debug.viewer import Viewer
from specscope.engine.config import EngineConfig
from specscope.live.client import Worker
from specscope.trace.record.params import SamplingParams
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.spans import SpanLevel
from specscope.tui.app import ScopeApp

BATCH = 8
SETTLE_SECONDS = 1.5  # what it takes to come up is not what it costs to be watched
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def main(task: str) -> None:
    """Measure `rounds` pairs; write the rates of both sides in tokens/s, and the processor time of both processes."""
    settings = json.loads(task)
    worker = Worker(EngineConfig(**settings["config"]), [], PARAMS)
    rates: dict[str, list[float]] = {"observed": [], "off": []}
    taken: dict[str, Counter[str]] = {"observed": Counter(), "off": Counter()}
    try:
        _wait_idle(worker)
        for number in range(settings["rounds"] + 1):
            for name in ("observed", "off") if number % 2 else ("off", "observed"):
                rate, seconds = _observed(worker) if name == "observed" else _off(worker)
                if number:
                    rates[name].append(rate)
                    taken[name].update(seconds)
    finally:
        worker.close()
    # Both sides make the same tokens, so that a token is a measure of either.
    made = settings["rounds"] * BATCH * TOKENS
    by_token = {side: {f"{who}, by token": 1000 * s / made for who, s in of.items()} for side, of in taken.items()}
    Path(settings["out"]).write_text(json.dumps({"rates": rates, "processor_ms": by_token}))


def _seconds(worker: Worker) -> Counter[str]:
    """Processor time so far of the engine's process and of this one, which draws the screen and writes the capture."""
    return Counter({"engine": process_seconds(worker.pid), "screen and capture": process_seconds()})


Measured = tuple[float, "Counter[str]"]  # tokens/s, and seconds of processor time by process


def _off(worker: Worker) -> Measured:
    worker.ask("watch", False)
    return _measured(worker)


def _measured(worker: Worker) -> Measured:
    before = _seconds(worker)
    rate = _rate(worker)
    return rate, _seconds(worker) - before


def _observed(worker: Worker) -> Measured:
    """The same with capture, metrics and the screen, which has been up for a while."""
    assert worker.ready is not None
    worker.ask("watch", True)
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        options = OutputOptions(str(Path(folder) / "run.jsonl"), None, None, SpanLevel.TREES, 0)
        ready = worker.ready
        outputs = Outputs(options, worker.bus, ready.run, ready.vocabulary, PARAMS)
        app = ScopeApp(Viewer(control=worker), title="bench")

        def drive() -> None:
            time.sleep(SETTLE_SECONDS)
            found.append(_measured(worker))
            app.call_from_thread(app.exit)

        driver = threading.Thread(target=drive)
        app.call_later(driver.start)
        app.run()
        driver.join()
        outputs.close()
    return found[0]


def _rate(worker: Worker) -> float:
    """Tokens/s of one batch, from the first submission until the engine is idle again."""
    start = time.perf_counter()
    for prompt in prompts_of(BATCH):
        worker.ask("submit", prompt)
    while worker.status == "idle":
        time.sleep(0.002)
    _wait_idle(worker)
    return BATCH * TOKENS / (time.perf_counter() - start)


def _wait_idle(worker: Worker) -> None:
    while worker.status != "idle":
        if worker.status == "ended":
            raise SystemExit(f"the worker ended: {worker.error}")
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1])
