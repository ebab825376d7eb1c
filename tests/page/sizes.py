"""How large the page of a long run is, how long it takes to make, and how soon Chromium shows it.

    python -m tests.page.sizes traces/eagle.jsonl 10000

The long run is made of a capture's steps again and again, each time with other numbers and tokens: else deflate would
find the repetition. Reading a capture is not in the time.
"""

import itertools
import shutil
import sys
import tempfile
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np

from specscope.page.write import PageRun, write_page
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture

TOKENS = 20_000  # of the vocabulary, drawn by Zipf's law


def jittered(value, rng):
    """A record with other numbers and tokens of the same kinds; 0, 1 and shapes stay."""
    changes = {}
    for field in fields(value):
        held = getattr(value, field.name)
        if is_dataclass(held):
            changes[field.name] = jittered(held, rng)
        elif isinstance(held, np.ndarray) and held.dtype.kind == "f":
            other = (held * rng.uniform(0.5, 1.0, held.shape)).astype(held.dtype)
            changes[field.name] = np.where((held == 0) | (held == 1), held, other)
        elif isinstance(held, np.ndarray) and field.name in ("token", "top", "draft_top", "choice"):
            changes[field.name] = (rng.zipf(1.3, held.shape) % TOKENS).astype(held.dtype)
    return replace(value, **changes)


def long_run(sample, steps):
    """A history of so many request steps."""
    read, rng = read_capture(sample).history, np.random.default_rng(1)
    pieces = {token: bytes(rng.integers(97, 123, rng.integers(2, 9)).tolist()) for token in range(TOKENS)}
    made, count = History(read.run, Vocabulary(pieces)), 0
    for number, record in enumerate(itertools.cycle(read.steps)):
        lap = number // len(read.steps)

        def of_lap(info, lap=lap):
            return replace(info, id=f"{info.id}.{lap}")

        change = {
            "admitted": tuple(map(of_lap, record.admitted)),
            "requests": tuple(
                replace(jittered(part, rng), request=f"{part.request}.{lap}") for part in record.requests
            ),
            "finished": tuple(replace(end, info=of_lap(end.info)) for end in record.finished),
        }
        made.append(replace(record, step=number, preempted=(), **change))
        count += len(record.requests)
        if count >= steps:
            break
    return made


def first_view(path):
    """Seconds until Chromium shows the figures, and until it shows the last request's tree."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab, begun = browser.new_page(), time.monotonic()
        tab.goto(path.as_uri(), wait_until="commit")
        tab.wait_for_selector(".figures b")
        first = time.monotonic() - begun
        tab.wait_for_load_state("load")
        loaded = time.monotonic() - begun
        last = tab.evaluate("JSON.parse(document.getElementById('head').textContent).runs[0].requests.at(-1).id")
        begun = time.monotonic()
        tab.evaluate(f"location.hash = '#{last}'")
        tab.wait_for_selector(".panel.step .why")
        browser.close()
        return first, loaded, time.monotonic() - begun


def measure(sample, steps):
    """One line of figures."""
    run = long_run(sample, steps)
    with tempfile.TemporaryDirectory() as folder:
        path, begun = Path(folder) / "long.html", time.monotonic()
        size = write_page(path, [PageRun("long.jsonl", run, ())])
        took = time.monotonic() - begun
        line = f"{Path(sample).name}, {steps:,} request steps: {size / 1e6:.1f} MB, made in {took:.1f} s"
        try:
            shown = first_view(path)
        except ImportError:
            return f"{line} (no playwright)"
        first, loaded, last = (f"{seconds:.2f} s" for seconds in shown)
        return f"{line}; first view {first}, all loaded {loaded}, the last request's tree {last}"


if __name__ == "__main__":
    for number in sys.argv[2:]:
        print(measure(sys.argv[1], int(number)), flush=True)
