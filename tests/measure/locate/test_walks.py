"""Walks of target and drafters: nothing is located where nothing is wrong, and a planted fault at its own operation."""

import pytest
import torch

from specscope import SamplingParams
from specscope.analyze.diagnose.diagnosis import JudgedCase
from specscope.analyze.findings import Exit, Reference
from specscope.analyze.locate.located import Stage
from specscope.measure.judges import audit_options
from specscope.measure.locate.drive import KVOverwritten
from specscope.measure.locate.locate import _overwritten, locate
from specscope.trace.wire.reading import read_capture
from tests import dflash
from tests.analyze.audit.runs import SMALL, run
from tests.analyze.histories import write
from tests.engines import tiny_engine
from tests.faults.fault import Fault, in_every_engine
from tests.faults.judged import walked
from tests.faults.models import TARGET, story
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, TREE, Setting, capture, plant, short
from tests.heads import head_tensors, write_head, write_parallel_head
from tests.measure.head_runs import recorded
from tests.measure.locate import planted
from tests.model.test_architectures import CONFIGS

WARM = {"temperature": 0.8}


def some_ordinary(names, ordinary):
    """The names as parameters: the others take their turn in the slow tests."""
    return [pytest.param(name, marks=() if name in ordinary else pytest.mark.slow) for name in names]


def is_at(fault, located):
    """The first operation is the fault's, and it is told as it looks."""
    assert located.operation.name.startswith(fault.place), (located.operation, located.sentence, located.looks)
    assert fault.looks in located.looks, (located.looks, located.sentence)
    assert fault.says in located.sentence
    assert located.smallest


# The target


def ran(path, target, how="plain", dtype="float32"):
    """A short run of a draft model over a target; its history."""
    models = {"target": str(target), "dtype": dtype, "drafter": "draft_model", "draft_model": "self:2", "tree": TREE}
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=i, ignore_eos=True) for i in range(2)]
    texts, most = [story(i, 70) for i in range(2)], 32 if how == "chunks" else 512
    return read_capture(recorded(path, texts, params, **models, max_batch=3, max_step_tokens=most)).history


def walk_of_target(history):
    options = audit_options(history, None, None, None)
    return locate(JudgedCase.of(history, "run", options), stages=(Stage.TARGET,))


QUICK = ("attention scale", "not moved", "overwritten")


@pytest.mark.parametrize("name", some_ordinary(planted.TARGET, QUICK))
def test_a_fault_of_the_target_is_located_at_its_operation(tmp_path, name):
    fault = planted.TARGET[name]
    target = planted.write_family(tmp_path / "model", fault.family) if fault.family else TARGET
    with in_every_engine(fault.install):
        answer = walk_of_target(ran(tmp_path / "run.jsonl", target, fault.run))
    assert answer.exit is Exit.INCONSISTENT, answer
    is_at(fault, answer.located[0])


def test_kv_that_changed_and_was_not_read_is_told_by_the_engines_step():
    found = _overwritten(KVOverwritten(Reference("r1", 3, 40), 1, [7]))
    assert (found.where.index, found.where.step) == (3, 40)
    assert "between steps r1@3 and @4" in found.sentence


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.slow), "chunks"])
def test_a_healthy_run_is_walked_and_nothing_is_located(tmp_path, how):
    answer = walk_of_target(ran(tmp_path / "run.jsonl", TARGET, how))
    assert (answer.exit, answer.located, answer.left_out) == (Exit.CONSISTENT, (), ())
    assert "agree over" in answer.ruled_out[0]
    assert [held.operation.name for held in answer.walks[0].operations][-2:] == ["norm", "lm_head"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_nothing_is_located_in_a_healthy_architecture(tmp_path, family, dtype):
    target = planted.write_family(tmp_path / "model", family)
    answer = walk_of_target(ran(tmp_path / "run.jsonl", target, dtype=dtype))
    assert (answer.located, answer.left_out) == ((), ())


# Drafters over the trained target


def random_heads(folder):
    """Heads of other kinds over the tiny target, with random weights: how to draft with each."""
    norms = {f"fc_norm.{i}.weight": 1 + 0.1 * i + torch.zeros(48) for i in range(3)}
    window = {"sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"]}
    heads = {
        "p-eagle": (write_parallel_head(folder / "p", head_tensors(parallel=True, layers=2)), "4"),
        "eagle 1": (write_head(folder / "1", head_tensors(version=1)), "[(0,), (1,), (0, 0), (1, 0)]"),
        "eagle 3.1": (write_head(folder / "31", head_tensors() | norms, fc_norm=True, norm_output=True), "3"),
        "window": (write_head(folder / "w", head_tensors(layers=2), **window), "3"),
    }
    return {name: {"drafter": "eagle", "draft_model": str(head), "tree": tree} for name, (head, tree) in heads.items()}


@pytest.fixture(scope="session")
def captures(tmp_path_factory):
    """A healthy capture of each drafter, made when it is first asked for."""
    with pytest.MonkeyPatch.context() as patch:
        for name, how in random_heads(tmp_path_factory.mktemp("heads")).items():
            patch.setitem(DRAFTERS, name, how)
        yield lambda drafter, params=(): capture(Setting(drafter, dict(params), requests=2, batch=2, tokens=40))


def walk_of(path, drafter, install=None):
    return walked(path, TARGET, DRAFTERS[drafter]["draft_model"], install)


QUICK_DRAFTERS = ("features one late", "d2t off by a row")


@pytest.mark.parametrize("name", some_ordinary(planted.DRAFTER, QUICK_DRAFTERS))
def test_a_fault_of_a_drafter_is_located_at_its_operation(name, captures):
    fault = planted.DRAFTER[name]
    located = walk_of(captures(fault.run), fault.run, fault.install).located[0]
    is_at(fault, located)
    assert located.operation.name == fault.place
    assert located.certain


HEALTHY = ["eagle chain", "eagle tree", "eagle dynamic", "model chain", "model tree", "model dynamic", "early tree"]
HEALTHY += ["eagle 1", "eagle 3.1", "window"]


@pytest.mark.every(2)
@pytest.mark.parametrize("params", [{}, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("drafter", some_ordinary(HEALTHY, ("eagle tree", "model chain")))
def test_nothing_is_located_in_a_healthy_drafter(drafter, params, captures):
    result = walk_of(captures(drafter, params.items()), drafter)
    assert result.located == ()
    assert "agree, from their inputs" in result.ruled_out[-1]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle chain", "eagle dynamic", "model tree"])
@pytest.mark.parametrize(
    "crowded", [{"blocks": 12}, {"step_tokens": 32, "prompt": 150}], ids=["preempted", "in chunks"]
)
def test_nothing_is_located_where_requests_wait(drafter, crowded):
    setting = Setting(drafter, WARM, requests=3, tokens=40, **crowded)
    assert walk_of(capture(setting), drafter).located == ()


def test_a_head_that_drafts_in_one_pass_is_left_to_audit(captures):
    result = walk_of(captures("p-eagle"), "p-eagle")
    assert (result.located, result.exit) == ((), Exit.NOT_JUDGED)
    assert "audit judges it" in result.left_out[0]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle chain", "model tree"])
def test_nothing_is_located_in_a_run_of_bfloat16(drafter, monkeypatch):
    """The walk is in float32: other trees come out of it than were recorded."""
    monkeypatch.setitem(DRAFTERS, drafter, {**DRAFTERS[drafter], "dtype": "bfloat16"})
    path = capture(Setting(drafter, WARM, requests=2, tokens=60))
    assert (read_capture(path).history.run.dtype, walk_of(path, drafter).located) == ("bfloat16", ())


# DFlash heads, and a target's own modules


def walk_of_block(deep, head, folder, install=None, **rule):
    """The walk over a run of two requests, both by an engine into which a fault is put."""
    with in_every_engine(install or (lambda patch, engine: None)):
        engine = tiny_engine(deep, drafter="dflash", draft_model=str(head), **SMALL)
        history = run(engine, rule, tokens=30, prompts=["abcabcabcab", "the cat sat on the mat, the cat"])
        engine.close()
    return walked(write(history, folder / "run.jsonl"), deep, str(head), install)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", some_ordinary(dflash.VARIANTS, ("z-lab",)))
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.9}], ids=["greedy", "sampled"])
def test_nothing_is_located_in_a_healthy_block(tmp_path, deep, name, rule):
    found = walk_of_block(deep, dflash.VARIANTS[name](tmp_path / "h"), tmp_path, **rule)
    assert (found.located, found.left_out) == ((), ())
    assert any("agree, from their inputs to the chosen tokens" in line for line in found.ruled_out)


SELDOM = [name for name in planted.BLOCK if name != "features of other layers"]  # which cannot be switched within a run


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("name", "rarely"), [(name, rarely) for rarely, names in enumerate((planted.BLOCK, SELDOM)) for name in names]
)
def test_a_fault_of_a_block_is_located_at_its_operation(tmp_path, deep, name, rarely):
    """Always at work, or in one step of seven."""
    fault = planted.BLOCK[name]
    head = dflash.write_dflash(tmp_path / "h", dflash.dflash_tensors(seed=2))
    rare = Fault("", None, fault.install, "", rare=8)
    (located,) = walk_of_block(deep, head, tmp_path, lambda *where: plant(*where, rare, rarely=rarely)).located
    is_at(fault, located)


def walk_of_modules(name, *stages):
    """The walk over a fault's run, both by an engine that has it."""
    fault = FAULTS[name]
    setting = short(fault.setting, requests=2)
    return walked(capture(setting, fault), setting.target, None, fault.install, *stages)


MODULES = {
    "no norm of the state": "hnorm",
    "state before embedding": "eh_proj",
    "modules' nodes one further": "positions",
}


@pytest.mark.parametrize("name", some_ordinary(MODULES, ("no norm of the state", "modules' nodes one further")))
def test_a_fault_of_a_module_is_located_at_its_operation(name):
    (found,) = walk_of_modules(name).located
    assert found.operation.name == MODULES[name]


def test_several_modules_are_judged_and_not_walked():
    """And the target all the same."""
    found = walk_of_modules("modules in another order", Stage.TARGET, Stage.DRAFTER)
    assert not found.located
    (why,) = found.left_out
    assert why.startswith("drafter: 2 next-token modules draft a depth each: ")
    assert any(line.startswith("the target: ") for line in found.ruled_out)
