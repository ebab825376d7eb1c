"""Intervals cover what they say, and t is Student's."""

from __future__ import annotations

import numpy as np
import pytest

from specscope.analyze.compare.bootstrap import FEWEST, Ratio, estimates, marked
from specscope.analyze.compare.result import Estimate
from specscope.analyze.significance import t_quantile, t_two_sided

# From tables: degrees of freedom, quantile at 0.975.
TABLE = [(1, 12.7062), (2, 4.3027), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)]


@pytest.mark.parametrize(("degrees", "quantile"), TABLE)
def test_students_t(degrees, quantile):
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)
    assert t_two_sided(quantile, degrees) == pytest.approx(0.05, abs=1e-5)
    assert t_two_sided(-quantile, degrees) == pytest.approx(0.05, abs=1e-5)
    assert t_two_sided(0.0, degrees) == pytest.approx(1.0)


def ratio(rng, clusters, shift=0.0, name="x"):
    """Requests of their own ease, as long as they like; B's are shifted."""
    ease = rng.beta(4, 4, clusters)
    sides = []
    for by in (0.0, shift):
        drafts = rng.integers(10, 60, clusters)
        sides.append((rng.binomial(drafts * 3, np.clip(ease + by, 0, 1)).astype(float), drafts.astype(float)))
    return Ratio(name, (sides[0][0], sides[1][0]), (sides[0][1], sides[1][1]))


@pytest.mark.parametrize("clusters", [4, 12, 40])
def test_intervals_cover(clusters):
    rng = np.random.default_rng(clusters)
    tries = 150
    told = [estimates([ratio(rng, clusters, shift=0.05)], clusters)[0] for _ in range(tries)]
    missed = sum(not one.low <= 3 * 0.05 <= one.high for one in told)
    assert missed <= 15  # 7.5 are expected; more than 15 come in less than 1 % of such tests


def test_a_pair_takes_the_prompts_variation_out():
    rng = np.random.default_rng(1)
    paired = ratio(rng, 40)
    mixed = Ratio("x", (paired.top[0], paired.top[1][::-1].copy()), (paired.bottom[0], paired.bottom[1][::-1].copy()))
    first, second = (estimates([one], 40)[0].standard_error for one in (paired, mixed))
    assert first < 0.6 * second


def test_what_would_have_been_seen_is_seen_that_often():
    rng = np.random.default_rng(3)
    visible = np.mean([estimates([ratio(rng, 24)], 24)[0].visible for _ in range(20)]) / 3
    seen = sum(estimates([ratio(rng, 24, shift=visible)], 24)[0].low > 0 for _ in range(100))
    assert seen >= 85  # 95 are expected


def test_too_few_requests_have_no_interval():
    rng = np.random.default_rng(1)
    one = estimates([ratio(rng, FEWEST - 1)], FEWEST - 1)[0]
    assert one.difference is not None
    assert one.low is one.high is one.p_value is one.visible is None
    assert not one.significant


def test_the_same_figures_do_not_differ():
    same = np.arange(1.0, 9.0)
    one = estimates([Ratio("x", (same, same), (same + 1, same + 1))], 8)[0]
    assert (one.difference, one.low, one.high, one.p_value, one.significant) == (0.0, 0.0, 0.0, 1.0, False)


def test_two_engines_rounding_is_no_difference():
    """Sums of q that differ in their last bits, and all the same way: of two engines with the same decisions."""
    nodes = np.arange(4.0, 24.0)
    q = np.linspace(0.2, 0.9, 20) * nodes
    one = estimates([Ratio("q", (q, q + 1e-7 * nodes), (nodes, nodes))], 20)[0]
    assert not one.significant
    assert one.difference == 0
    other = estimates([Ratio("q", (q, q + 1e-3 * nodes), (nodes, nodes))], 20)[0]
    assert other.significant


def test_holm_takes_the_smallest_first_and_stops():
    p_values = [0.04, 0.001, 0.013, None, 0.5]
    found = marked([Estimate(str(p), 1.0, 1.0, p_value=p) for p in p_values], 0.05)
    assert [one.significant for one in found] == [False, True, True, False, False]
    assert not any(one.significant for one in marked([Estimate("x", 1.0, 1.0, p_value=0.026)] * 2, 0.05))


def test_it_is_the_same_each_time():
    rng = np.random.default_rng(5)
    one = ratio(rng, 12)
    assert estimates([one], 12) == estimates([one], 12)


@pytest.mark.parametrize("clusters", [3, 5])
def test_nothing_drops_by_more_than_all_of_it(clusters):
    """Three requests of very different acceptance: a rate was said to change by -149 to +63 %."""
    rng = np.random.default_rng(clusters)
    drafts = np.full(clusters, 40.0)
    for _ in range(40):
        tops = [rng.integers(0, 41, clusters).astype(float) * (rng.random(clusters) < 0.6) for _ in range(2)]
        (one,) = estimates([Ratio("rate", (tops[0], tops[1]), (drafts, drafts), percent=True)], clusters)
        assert -one.a <= one.low <= one.difference <= one.high <= 1 - one.a + 1e-12
