"""Faults planted into the target are located at their operation; healthy runs are not accused."""

from __future__ import annotations

import pytest

from specscope import SamplingParams
from specscope.analyze.diagnose.diagnosis import JudgedCase
from specscope.analyze.findings import Exit, Reference
from specscope.analyze.locate.located import Stage
from specscope.measure.judges import audit_options
from specscope.measure.locate.drive import KVOverwritten
from specscope.measure.locate.locate import _overwritten, locate
from specscope.trace.wire.reading import read_capture
from tests.faults.fault import in_every_engine
from tests.faults.models import TARGET, story
from tests.faults.settings import TREE
from tests.measure.head_runs import recorded
from tests.measure.locate.faults import FAULTS, write_family
from tests.model.test_architectures import CONFIGS

QUICK = ("attention scale", "KV in fp8", "chunks from 0", "head zeroed", "not moved", "overwritten")


def run(path, target, setting="plain", dtype="float32"):
    """A short run of a draft model over a target; its history."""
    how = {"target": str(target), "dtype": dtype, "drafter": "draft_model", "draft_model": "self:2", "tree": TREE}
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=i, ignore_eos=True) for i in range(3)]
    texts, most = [story(i, 70) for i in range(3)], 32 if setting == "chunks" else 512
    return read_capture(recorded(path, texts, params, **how, max_batch=3, max_step_tokens=most)).history


def located(history, **more):
    options = audit_options(history, None, None, None)
    return locate(JudgedCase.of(history, "run", options), stages=(Stage.TARGET,), **more)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_is_located_at_its_operation(tmp_path, name):
    fault = FAULTS[name]
    target = TARGET if fault.family == "llama" else write_family(tmp_path / "model", fault.family)
    with in_every_engine(fault.install):
        history = run(tmp_path / "run.jsonl", target, fault.setting)
        answer = located(history)
    assert answer.exit is Exit.INCONSISTENT, answer
    first = answer.located[0]
    assert first.operation.name.startswith(fault.operation), (first.operation, first.sentence, first.looks)
    assert fault.looks in first.looks, (first.looks, first.sentence)
    assert fault.says in first.sentence
    assert first.smallest


def test_kv_that_changed_and_was_not_read_is_told_by_the_engines_step():
    found = _overwritten(KVOverwritten(Reference("r1", 3, 40), 1, [7]))
    assert (found.where.index, found.where.step) == (3, 40)
    assert "between steps r1@3 and @4" in found.sentence


@pytest.mark.parametrize("setting", ["plain", "chunks"])
def test_a_healthy_run_is_walked_and_nothing_is_located(tmp_path, setting):
    answer = located(run(tmp_path / "run.jsonl", TARGET, setting))
    assert (answer.exit, answer.located, answer.left_out) == (Exit.CONSISTENT, (), ())
    assert "agree over" in answer.ruled_out[0]
    assert [held.operation.name for held in answer.walks[0].operations][-2:] == ["norm", "lm_head"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_nothing_is_located_in_a_healthy_architecture(tmp_path, family, dtype):
    history = run(tmp_path / "run.jsonl", write_family(tmp_path / "model", family), dtype=dtype)
    answer = located(history)
    assert (answer.located, answer.left_out) == ((), ())
