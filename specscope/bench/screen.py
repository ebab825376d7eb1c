"""The child of `specscope bench observe`: runs a worker with and without the live screen, on a terminal of its own."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from specscope.bench.observe import TOKENS, prompts_of
from specscope.debug.viewer import Viewer
from specscope.engine.config import EngineConfig
from specscope.engine.worker import Worker
from specscope.options import OutputOptions
from specscope.outputs import Outputs
from specscope.trace.params import SamplingParams
from specscope.trace.spans import Level
from specscope.tui.app import ScopeApp

BATCH = 8
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def main(task: str) -> None:
    """Measure `rounds` pairs and write {"observed": [...], "off": [...]} in tokens/s."""
    settings = json.loads(task)
    worker = Worker(EngineConfig(**settings["config"]), [], PARAMS)
    rates: dict[str, list[float]] = {"observed": [], "off": []}
    try:
        _wait_idle(worker)
        for number in range(settings["rounds"] + 1):
            for name in ("observed", "off") if number % 2 else ("off", "observed"):
                rate = _observed(worker) if name == "observed" else _off(worker)
                if number:
                    rates[name].append(rate)
    finally:
        worker.close()
    Path(settings["out"]).write_text(json.dumps(rates))


def _off(worker: Worker) -> float:
    worker.watch(False)
    return _rate(worker)


def _observed(worker: Worker) -> float:
    """The same with capture, metrics and the screen."""
    assert worker.ready is not None
    worker.watch(True)
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        options = OutputOptions(str(Path(folder) / "run.jsonl"), None, None, Level.TREES, None, True)
        ready = worker.ready
        outputs = Outputs(options, worker.bus, ready.run, ready.vocabulary, PARAMS, log=lambda line: None)
        app = ScopeApp(Viewer(control=worker), title="bench")

        def drive() -> None:
            rates.append(_rate(worker))
            app.call_from_thread(app.exit)

        driver = threading.Thread(target=drive)
        app.call_later(driver.start)
        app.run()
        driver.join()
        outputs.close()
    return rates[0]


def _rate(worker: Worker) -> float:
    """Tokens/s of one batch, from the first submission until the engine is idle again."""
    start = time.perf_counter()
    for prompt in prompts_of(BATCH):
        worker.submit(prompt)
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
