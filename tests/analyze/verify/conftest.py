"""Real runs of every drafter, to be edited; kept for the session."""

import pytest

from specscope.analyze.findings import CheckResult
from tests.analyze.audit import runs as audited
from tests.analyze.edits import checks
from tests.engines import SMALL, fresh

GREEDY = {"temperature": 0.0}
HOT = {"temperature": 1.3}
RUNS = {  # by name: the engine, and how it samples
    "sampled": ("draft tree", HOT),
    "greedy": ("ngram", GREEDY),
    "deterministic": ("eagle dynamic", HOT),
    "moved": ("draft tree", GREEDY),
}


def run(engine, blocks=60, max_tokens=30, **params):
    """A history of five requests, three at a time."""
    fresh(engine, blocks)
    return audited.run(engine, {"ignore_eos": False, **params}, max_tokens)


@pytest.fixture(scope="session")
def runs(bench):
    found = {name: run(bench.engine(engine), **params) for name, (engine, params) in RUNS.items()}
    return found | {"preempted": run(bench.engine("ngram"), SMALL, **GREEDY)}


@pytest.fixture(scope="session")
def sound(runs):
    """The checks of each run, none of which fails."""
    found = {name: checks(history) for name, history in runs.items()}
    assert not [
        (name, one) for name, of_run in found.items() for one in of_run.values() if one.result is CheckResult.FAILED
    ]
    return found
