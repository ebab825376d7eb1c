"""Costs of steps: what a tree takes by them, and files that hold none."""

import dataclasses

import pytest

from specscope.errors import UserError
from specscope.trace.costs import CostPoint, StepCosts, at, fed, read_costs, write_costs
from specscope.trace.plan import parse_plan
from tests.analyze.histories import RUN


def point(rows, seconds):
    return CostPoint(rows, seconds, seconds * 0.98, seconds * 1.02)


COSTS = StepCosts(
    target=RUN.target,
    drafter=RUN.drafter,
    draft_model="",
    dtype=RUN.dtype,
    batch=2,
    context=100,
    machine={"cpu": "one"},
    plain=point(2, 0.010),
    step=(point(4, 0.020), point(8, 0.024), point(16, 0.040)),
    first=point(2, 0.003),
    passes=(point(2, 0.002), point(8, 0.005)),
)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 0.020), (4, 0.020), (6, 0.022), (12, 0.032), (16, 0.040), (20, 0.048)]
)
def test_between_points_and_beyond_them_it_is_a_line(rows, seconds):
    assert at(COSTS.step, rows) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("tree", "widths"),
    [
        ("1", []),
        ("3", [1, 1]),
        ("2x3", [2, 2]),
        ("[(0,), (1,), (2,), (0, 0), (0, 1)]", [1]),
        ("dynamic:8,depth=3,top=4", [4, 4]),
    ],
)
def test_what_each_later_pass_feeds(tree, widths):
    assert fed(parse_plan(tree)) == widths


def test_a_step_is_rows_and_passes():
    chain, tree = parse_plan("3"), parse_plan("dynamic:7,depth=2,top=4")
    assert COSTS.seconds(chain, 3) == pytest.approx(0.024 + 0.003 + 2 * 0.002)
    assert COSTS.seconds(tree, 7) == pytest.approx(0.040 + 0.003 + 0.005)
    assert COSTS.error == pytest.approx(0.02)


def test_a_file_is_read_as_it_was_written(tmp_path):
    write_costs(str(tmp_path / "costs"), COSTS)
    assert read_costs(str(tmp_path / "costs"), RUN, 2) == COSTS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "other"}, "the costs of target other, and the capture's is SmolLM2-135M-Instruct"),
        ({"drafter": "eagle"}, "of drafter eagle"),
        ({"dtype": "float32"}, "of dtype float32"),
        ({"batch": 8}, "costs at batch 8: give --batch 8"),
        ({"kind": "else"}, "holds no costs"),
        ({"step": ()}, "holds no costs"),
        ({"plain": CostPoint(1, -1.0, 0.0, 0.0)}, "holds no costs"),
    ],
)
def test_those_of_another_engine_are_refused(change, said, tmp_path):
    write_costs(str(tmp_path / "costs"), dataclasses.replace(COSTS, **change))
    with pytest.raises(UserError, match=said):
        read_costs(str(tmp_path / "costs"), RUN, 2)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, b"null", b'{"target": 1}', b"x" * 2**21]
)
def test_what_holds_none_is_refused(content, tmp_path):
    (tmp_path / "costs").write_bytes(content)
    with pytest.raises(UserError, match=r"holds no costs|the costs .* larger than 1 MiB, the limit"):
        read_costs(str(tmp_path / "costs"), RUN, 2)
