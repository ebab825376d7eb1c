"""Costs of steps: what lies between, below and beyond what was measured, and files that hold costs or none."""

import dataclasses
import itertools

import msgspec
import pytest

from specscope.errors import UserError
from specscope.plans.costs import CostPoint, Costs, about_run, at, read_costs, write_costs
from tests.analyze.histories import RUN


def point(rows, seconds):
    return CostPoint(rows, seconds, seconds * 0.98, seconds * 1.02)


def curve(*points):
    return tuple(itertools.starmap(point, points))


STEPS = curve((2, 0.010), (4, 0.020), (8, 0.024), (16, 0.040))
OF_RUN = Costs({**about_run(RUN), "cpu": "one"}, STEPS, curve((2, 0.003)), curve((2, 0.002), (8, 0.005)))


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 0.010), (4, 0.020), (6, 0.022), (12, 0.032), (16, 0.040), (20, 0.048)]
)
def test_between_points_and_beyond_them_it_is_a_line(rows, seconds):
    assert at(STEPS, rows) == pytest.approx(seconds)


def test_a_file_is_read_as_it_was_written(tmp_path):
    file = str(tmp_path / "costs")
    write_costs(file, OF_RUN)
    assert read_costs(file, RUN, 2) == OF_RUN
    assert read_costs(str(tmp_path / "none"), RUN, 2) is None
    write_costs(file, dataclasses.replace(OF_RUN, about={}))  # what was made up need not name its engine
    assert read_costs(file, RUN, 2).step == STEPS


@pytest.mark.parametrize(
    ("about", "batch", "said"),
    [
        ({"target": "other"}, 2, "the costs of target other, and the capture's is SmolLM2-135M-Instruct"),
        ({"drafter": "eagle"}, 2, "of drafter eagle"),
        ({"dtype": "float32"}, 2, "of dtype float32"),
        ({}, 8, "costs at batch 2: give --batch 2"),
    ],
)
def test_those_of_another_engine_are_refused(about, batch, said, tmp_path):
    write_costs(str(tmp_path / "costs"), dataclasses.replace(OF_RUN, about={**OF_RUN.about, **about}))
    with pytest.raises(UserError, match=said):
        read_costs(str(tmp_path / "costs"), RUN, batch)


HOLDS_NONE = "holds no costs: name a file that --costs wrote, or a new file"


@pytest.mark.parametrize(
    "changed",
    [
        {"step": ()},
        {"step": curve((1, 0.0), (2, 0.1))},
        {"step": curve((2, 0.1), (1, 0.1))},
        {"step": curve((4, 0.1), (4, 0.2))},
        {"step": curve((4, 0.1), (40, 0.2), (8, 0.2))},
        {"step": curve((1, 0.1), (10**12, 0.2))},
        {"step": curve((4, -0.1))},
        {"passes": curve((4, 0.1), (4, 0.1))},
        {"first": curve((1, -1.0))},
        {"kind": "something else"},
        {"step": 3},
        {"about": 3},
    ],
)
def test_what_cannot_be_costs_is_refused(tmp_path, changed):
    (tmp_path / "c").write_bytes(msgspec.json.encode(dataclasses.asdict(OF_RUN) | changed))
    with pytest.raises(UserError, match=HOLDS_NONE):
        read_costs(str(tmp_path / "c"), RUN, 2)
