"""Draws of drafts that go wrong have a place; healthy ones have none."""

from __future__ import annotations

import dataclasses

import pytest

from specscope.analyze.diagnose.case import Case
from specscope.analyze.locate.draws import located_draws
from specscope.analyze.locate.located import Stage
from tests.faults.planted.drafts import FAULTS as OF_DRAFTS
from tests.faults.planted.sampler import FAULTS as OF_SAMPLER
from tests.faults.settings import SETTINGS, history, record

FAULTS = {fault.name: fault for fault in (*OF_DRAFTS, *OF_SAMPLER)}
COINS = ("draft coins of no step", "draft coins of one seed", "one coin for all draws", "draft coins of the verdict")


def drawn(path, setting, fault=None):
    """What is located in a short run."""
    short = dataclasses.replace(SETTINGS[setting], requests=6, tokens=40)
    return located_draws(Case.of(history(record(short, path / "run.jsonl", fault))))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == COINS[0] else pytest.mark.slow) for name in COINS]
)
def test_coins_that_are_used_again_are_located(tmp_path, name):
    located = drawn(tmp_path, FAULTS[name].setting, FAULTS[name])
    assert [item.operation.stage for item in located][:1] == [Stage.DRAWS]
    assert located[0].operation.name == "draft coins"
    assert located[0].explained > 20


@pytest.mark.slow
def test_a_draw_beside_its_coin_is_located(tmp_path):
    located = drawn(tmp_path, "early chain warm", FAULTS["draws one token early"])
    assert located[0].operation.name == "draft draw"


def test_a_healthy_run_has_nothing(tmp_path):
    assert drawn(tmp_path, "early tree warm") == []
