"""The figures that say why the screens draw lines of their own."""

from __future__ import annotations

import pytest

from specscope.bench.widgets import run_widgets


@pytest.mark.slow  # it compares times
def test_the_lines_cost_less_than_the_widgets_they_stand_for():
    rows = {row["widget"]: row["ratio"] for row in run_widgets(1)}
    assert rows.keys() == {"DataTable", "Tree", "Sparkline", "Footer"}
    assert rows["DataTable"] > 2
    assert rows["Footer"] > 2
