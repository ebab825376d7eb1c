"""Real runs of every drafter, to be edited; kept for the session."""

import pytest

from specscope import SamplingParams
from specscope.trace.history.history import History
from tests.engines import PROMPTS, SMALL, fresh

GREEDY = {"temperature": 0.0}
HOT = {"temperature": 1.3}
RUNS = {  # by name: the engine, and how it samples
    "sampled": ("draft tree", HOT),
    "greedy": ("ngram", GREEDY),
    "deterministic": ("eagle dynamic", HOT),
    "moved": ("draft tree", GREEDY),
}


def run(engine, blocks=60, max_tokens=40, **params):
    """A history of five requests, three at a time."""
    fresh(engine, blocks)
    history = History(run=engine.run_info, vocabulary=engine.vocabulary)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_tokens=max_tokens, seed=seed, **params))
    while engine.busy:
        history.append(engine.step())
    return history


@pytest.fixture(scope="session")
def runs(built):
    engines, _ = built
    found = {name: run(engines[engine], **params) for name, (engine, params) in RUNS.items()}
    return found | {"preempted": run(engines["ngram"], SMALL, **GREEDY)}
