"""The growth benchmark, in small; and the exponent that it prints."""

import json

import pytest

from specscope.bench import curves as curves_module
from specscope.bench.curves import Curve, exponent, measure
from specscope.bench.growth import curves, run_growth


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
def test_the_exponent_is_that_of_the_curve(power):
    sizes = (10, 100, 1000)
    assert exponent(sizes, [3e-4 * size**power for size in sizes]) == pytest.approx(power)


def test_every_curve_is_measured_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(curves_module, "ROUNDS", 1)
    monkeypatch.setattr(curves_module, "REPEATS", 1)
    small = [Curve(c.name, c.unit, (64, 128), c.seconds, c.most) for c in curves()]
    run_growth(str(tmp_path / "growth.json"), small)
    rows = json.loads((tmp_path / "growth.json").read_text())["curves"]
    assert [row["name"] for row in rows] == [c.name for c in curves()]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)


def test_the_least_time_of_the_rounds_counts(monkeypatch):
    monkeypatch.setattr(curves_module, "ROUNDS", 3)
    times = iter([5.0, 60.0, 4.0, 80.0, 6.0, 70.0])
    assert measure(Curve("x", "y", (1, 2), lambda size: next(times))) == [4.0, 60.0]
