"""Shared by all tests: one thread each (two processes of tests on two cores), hypothesis without deadlines."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.thinning import ordinary
from tests.waiting import HANG_SECONDS

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without it
settings.register_profile("search", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A suite that passed passes again: new examples are looked for with --hypothesis-profile=search
settings.register_profile("specscope", settings.get_profile("search"), derandomize=True, max_examples=20)
settings.load_profile("specscope")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("every") and not item.get_closest_marker("slow"):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        every = cases[0].get_closest_marker("every").args[0]
        kept = ordinary([case.callspec.indices for case in cases], every)
        for place in set(range(len(cases))).difference(kept):
            cases[place].add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_collection_finish():
    """What is imported by now stays, and no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random-weight Llama of 3 layers and a byte-level tokenizer of 300 tokens."""
    from tests.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """The same with 7 layers: an EAGLE-3 head takes features from three of them (2, 3 and 4)."""
    from tests.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("deep"), layers=7)


@pytest.fixture(scope="session")
def built(deep, tmp_path_factory):
    """Engines with every drafter over one target, each with the KV blocks that it had, built once for all modules."""
    from tests.analyze.audit.runs import Bench
    from tests.engines import DRAFTERS

    bench = Bench(deep, tmp_path_factory.mktemp("head"))
    made = {name: bench.fresh(name) for name in DRAFTERS}
    return made, {name: engine.runner.cache.pool.blocks for name, engine in made.items()}


@pytest.fixture(scope="module")
def engines(built):
    """These, as new."""
    from tests.engines import pressed

    for name, engine in built[0].items():
        for subscription in engine.bus.subscriptions:
            subscription.close()
        engine.bus.subscriptions.clear()
        pressed(engine, built[1][name])
    return built[0]


@pytest.fixture
def terminal():
    """Starts a command on a terminal (tests/processes.py), of which nothing is left behind."""
    from tests.processes import Terminal

    with contextlib.ExitStack() as opened:
        yield lambda *command, **how: opened.enter_context(contextlib.closing(Terminal(command, **how)))


@pytest.fixture
def patient(monkeypatch):
    """An OTLP endpoint that has not answered yet is waited for, however busy the machine."""
    monkeypatch.setattr("specscope.trace.wire.sending.UNKNOWN", HANG_SECONDS)


GROWN = 2**28  # bytes
_resident = [0]  # bytes of this process after the last collection


@pytest.fixture(autouse=True)
def _room():
    """Free what tests have left. Engines lie in circles of references, and the collector counts objects and not bytes:
    two processes of a whole run took 22 GB.
    """
    yield
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > _resident[0] + GROWN:
        gc.collect()
        if sys.platform == "linux":  # what is free between others stays with the process
            ctypes.CDLL(None).malloc_trim(0)
        _resident[0] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
