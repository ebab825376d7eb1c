"""Runs without a fault: no cause is named, with the models at hand and without."""

import pytest

from specscope.analyze.diagnose.hypotheses import diagnose
from specscope.analyze.findings import Exit
from tests.faults.healthy import HEALTHY
from tests.faults.settings import history, record
from tests.faults.table import diagnosed

SOME = [
    "none, warm",
    "ngram tree, warm, crowded",
    "model chain, rules",
    "early tree, penalties",
    "eagle dynamic, greedy",
    "eagle adaptive, warm",
]


def check(name, folder):
    setting = HEALTHY[name]
    path = record(setting, folder / "healthy.jsonl")
    alone, found = diagnose(history(path)), diagnosed(path, setting)
    assert not alone.faults, [(one.cause.label, one.score, one.for_) for one in alone.faults]
    assert not found.faults, [(one.cause.label, one.score, one.for_) for one in found.faults]
    assert not found.unexplained, found.unexplained
    assert found.exit is Exit.CONSISTENT


@pytest.mark.parametrize("name", SOME)
def test_a_healthy_run_names_no_cause(name, tmp_path):
    check(name, tmp_path)


def test_there_are_sixty_of_them():
    assert len(HEALTHY) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEALTHY if name not in SOME])
def test_no_healthy_run_names_a_cause(name, tmp_path):
    check(name, tmp_path)
