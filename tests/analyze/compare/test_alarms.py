"""Runs of the same configuration with other seeds: no more alarms than 5 % allows; a real change is seen."""

from __future__ import annotations

import pytest

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.result import Sameness

from .runs import Made, side

RUNS = 50
# Of 50 at 5 %, more than 6 come in 1.2 % of cases. Holm's correction and correlated figures leave fewer than 5 %.
MOST = 6


@pytest.mark.slow  # 30 s
def test_fifty_comparisons_of_one_configuration():
    cache = {}  # of the model's distributions
    alarms = []
    for number in range(RUNS):
        a, b = (side(Made(seed=2 * number + at, _cache=cache)) for at in (0, 1))
        found = compare(a, b)
        if found.answer is Sameness.DIFFERENT:
            alarms.append((number, found.reasons))
    assert len(alarms) <= MOST, alarms


def test_a_few_comparisons_of_one_configuration():
    cache = {}
    answers = [compare(*(side(Made(seed=n + at, _cache=cache)) for at in (100, 200))).answer for n in range(6)]
    assert answers.count(Sameness.DIFFERENT) <= 2  # three or more of six come in 0.2 % of cases


def test_a_worse_drafter_is_seen_with_other_seeds():
    found = compare(side(seed=1), side(seed=2, blur=0.6))
    tau = next(one for one in found.figures if one.name == "tau")
    assert found.answer is Sameness.DIFFERENT
    assert tau.significant
    assert tau.high < 0
