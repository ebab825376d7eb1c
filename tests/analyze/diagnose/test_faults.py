"""Planted faults: each is really there, the engine survives it, and diagnose names its cause first."""

import dataclasses

import pytest

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.findings import Exit
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, history, record
from tests.faults.table import planted

FAST = [  # one of each kind of evidence: the capture alone, audit, models run again
    "coins by row",
    "layers one lower",
    "mask shows siblings",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


def steps_of(path):
    return [part for step in history(path).steps for part in step.requests]


def is_there(name, folder):
    """The run with the fault went to its end, and is not the run without it."""
    setting = SETTINGS[FAULTS[name].setting]
    healthy = folder / f"healthy-{FAULTS[name].setting}.jsonl"
    if not healthy.exists():
        record(setting, healthy)
    bad = folder / f"{name.replace(' ', '_')}.jsonl"
    record(setting, bad, FAULTS[name])
    assert len(history(bad).requests) == setting.requests
    assert all(one.end is not None for one in history(bad).requests.values())
    right, wrong = steps_of(healthy), steps_of(bad)
    assert len(right) != len(wrong) or any(a != b for a, b in zip(right, wrong, strict=True))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FAST)
def test_the_cause_is_named_first(name, folder):
    is_there(name, folder)
    found = planted(name, folder)
    assert found.exit is Exit.INCONSISTENT
    assert found.suspects[0].cause is FAULTS[name].cause
    assert found.suspects[0].for_
    assert found.suspects[0].example is not None
    assert "#" in found.suspects[0].command("run.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in FAST])
def test_the_cause_is_named(name, folder):
    is_there(name, folder)
    found = planted(name, folder)
    assert found.exit is Exit.INCONSISTENT, "missed silently"
    assert found.suspects[0].cause is FAULTS[name].cause


def test_every_fault_can_be_planted(tmp_path):
    """Faults replace parts of the engine by name: those that are slow tests must not go stale unseen."""
    for name, fault in FAULTS.items():
        short = dataclasses.replace(SETTINGS[fault.setting], requests=2, tokens=8)
        path = record(short, tmp_path / f"{name.replace(' ', '_')}.jsonl", fault)
        assert len(history(path).requests) == 2, name


def test_every_cause_has_a_fault():
    planted_causes = {fault.cause for fault in FAULTS.values()}
    assert planted_causes == {cause for cause in Cause if cause.is_fault}
    assert len(FAULTS) >= 28


def test_causes_have_stable_names():
    labels = [cause.label for cause in Cause]
    assert len(set(labels)) == len(labels)
    assert all(label.isidentifier() for label in labels)
    assert all(cause.about and cause.look for cause in Cause)
