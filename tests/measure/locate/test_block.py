"""A DFlash head's walk: nothing where nothing is wrong, and a planted fault at its own operation."""

import pytest

from specscope import Engine
from tests.analyze.audit.runs import run, saved
from tests.dflash import VARIANTS, dflash_tensors, write_dflash
from tests.faults.fault import Fault, in_every_engine
from tests.faults.planted.block import lower, no_norm, one_further, other_mask, row_before, stale_root
from tests.faults.settings import plant
from tests.measure.locate.test_drafter import walk_of

PROMPTS = ["abcabcabcab", "the cat sat on the mat, the cat"]
PLANTED = {  # and where each must be located
    "features of other layers": (lower, "features layer 2"),
    "norm left out": (no_norm, "hidden_norm"),
    "wrong mask token": (other_mask, "tokens"),
    "block positions off by one": (one_further, "positions"),
    "stale KV": (stale_root, "midlayer.self_attn.context key"),
    "context written from the wrong row": (row_before, "midlayer.self_attn.context key"),
}


def planted(install, rarely):
    """In all steps, or in one of seven."""
    fault = Fault("", None, install, "", rare=8)
    return lambda patch, engine: plant(patch, engine, fault, rarely=rarely)


def walked(deep, head, folder, install=None, **rule):
    """The walk over a run of two requests, both by an engine into which a fault is put."""

    def recorded():
        how = {"drafter": "dflash", "draft_model": str(head), "kv_memory": 0.01, "max_batch": 3, "max_step_tokens": 24}
        engine = Engine(target=str(deep), dtype="float32", **how)
        capture = saved(run(engine, rule, tokens=40, prompts=PROMPTS), folder / "run.jsonl")
        engine.close()
        return capture

    if install is None:
        return walk_of(recorded(), str(deep), str(head), None)
    with in_every_engine(install):
        capture = recorded()
    return walk_of(capture, str(deep), str(head), install)


@pytest.mark.parametrize(
    "name", ["z-lab", *(pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS if n != "z-lab")]
)
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.9}], ids=["greedy", "sampled"])
def test_nothing_is_located_where_nothing_is_wrong(tmp_path, deep, name, rule):
    found = walked(deep, VARIANTS[name](tmp_path / "h"), tmp_path, **rule)
    assert found.located == ()
    assert any("agree, from their inputs to the chosen tokens" in line for line in found.ruled_out)
    assert found.left_out == ()


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("rarely", [False, True], ids=["always", "one step in seven"])
def test_a_planted_fault_is_located_at_its_operation(tmp_path, deep, name, rarely):
    install, operation = PLANTED[name]
    if rarely and install is lower:
        pytest.skip("which layers are observed cannot be switched within a run")
    head = write_dflash(tmp_path / "h", dflash_tensors(seed=2))
    (found,) = walked(deep, head, tmp_path, planted(install, rarely)).located
    assert found.operation.name.startswith(operation), found.operation
