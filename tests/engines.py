"""Engines with every drafter over one tiny target, for tests that go back, look and fork."""

import pytest

from specscope import Engine
from specscope.engine.build import drafter_blocks
from specscope.speculate.drafters.model_drafter import ModelDrafter
from tests.mtp import add_modules

PROMPTS = ["abcabcabcab", "hello hello hel", "x", "the cat sat on the mat, the cat", "1 2 3 1 2 3 1 2"]
HEAD = "the cat sat on the mat and the dog ran after the cat, "  # three full blocks
DRAFTERS = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "tree": "3x3", "ngram_min": 1},
    "suffix": {"drafter": "suffix", "tree": "dynamic:6,depth=4"},
    "draft tree": {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"},
    "eagle": {"drafter": "eagle", "tree": "[(0,), (1,), (0, 0)]"},
    "eagle dynamic": {"drafter": "eagle", "tree": "dynamic:6,depth=3,top=3"},
    "p-eagle": {"drafter": "eagle", "tree": "[(0,), (1,), (0, 0)]"},
    "p-eagle chain": {"drafter": "eagle", "tree": "4"},
    "p-eagle dynamic": {"drafter": "eagle", "tree": "dynamic:6,depth=3,top=3"},
    "dflash": {"drafter": "dflash", "tree": "[(0,), (1,), (0, 0)]"},
    "dflash chain": {"drafter": "dflash"},
    "dflash dynamic": {"drafter": "dflash", "tree": "dynamic:6,depth=3,top=3"},
    "mtp": {"drafter": "mtp", "tree": "[(0,), (1,), (0, 0)]"},  # one module, iterated
    "mtp-3": {"drafter": "mtp", "tree": "3"},  # three, each once
}
# Where each drafter is tried for a long time, those that are like another one are slow tests.
LIKE_ANOTHER = ("eagle", "p-eagle", "p-eagle chain", "dflash", "dflash dynamic", "mtp")
SMALL = 9  # blocks: with a few requests somebody is preempted


def tiny_engine(target, **how):
    """An engine over a tiny model: in float32, with little KV and one thread."""
    return Engine(**{"target": str(target), "dtype": "float32", "kv_memory": 0.01, "threads": 1, **how})


def run_all(engine, most=10**6):
    """The records of so many steps, or up to the end."""
    records = []
    while engine.busy and len(records) < most:
        records.append(engine.step())
    return records


def each_drafter(names):
    """The names as parameters of a test that takes long."""
    return [pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ()) for name in names]


def with_modules(target, folder):
    """The target with next-token modules in its checkpoint, by the name of the drafter."""
    return {"mtp": add_modules(target, folder / "one"), "mtp-3": add_modules(target, folder / "three", 3)}


def fresh(engine, blocks):
    """The engine as new, with so many blocks for the target's KV; finished requests of an earlier test are gone."""
    engine.current = None
    engine.cancel_all()
    while engine.busy:
        engine.step()
    engine.timeline, engine.last, engine.steps = None, None, 0
    model = isinstance(engine.drafter, ModelDrafter)
    pools = [engine.runner.cache.pool, *((engine.drafter.cache.pool,) if model else ())]
    for pool, count in zip(pools, (blocks, drafter_blocks(engine.config, blocks)), strict=False):
        assert pool.used == 0
        pool.__init__(count)
        pool.keep_apart(engine.config.max_batch)
    engine.keep_timeline()


def pressed(engine, blocks):
    """The same without a timeline, so that it may run ahead."""
    fresh(engine, blocks)
    engine.timeline = None
