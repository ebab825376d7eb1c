"""Files of costs: what is kept is read again, and what cannot be costs is refused in one line."""

import msgspec
import pytest

from specscope.engine.cost_file import read_named
from specscope.errors import UserError
from specscope.speculate.costs import Costs
from specscope.trace.costs import CostPoint


def curve(*points):
    return tuple(CostPoint(rows, seconds, seconds, seconds) for rows, seconds in points)


STEP, BATCH = curve((1, 0.01), (9, 0.02)), curve((4, 0.015), (5, 0.016))
GOOD = {"about": {}, "step": STEP, "batches": (BATCH,), "first": 0.001, "first_request": 0.0, "passes": curve((4, 0.0))}


def read(path, **changed):
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(Costs(**GOOD)), **msgspec.to_builtins(changed)}))
    return read_named(str(path), {})


def test_what_is_kept_is_read_again(tmp_path):
    assert read(tmp_path / "c.json") == Costs(**GOOD)
    assert read(tmp_path / "c.json", batches=()).batches == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"step": ()},
        {"step": curve((1, 0.0), (2, 0.1))},
        {"step": curve((2, 0.1), (1, 0.1))},
        {"step": curve((1, 0.1), (10**12, 0.2))},
        {"batches": ((),)},
        {"batches": (BATCH, BATCH)},
        {"batches": (curve((1, 0.1), (2, 0.2)),)},
        {"batches": (curve((4, 0.1), (4, 0.2)),)},
        {"batches": (curve((4, 0.1), (40, 0.2), (8, 0.2)),)},
        {"batches": (curve((4, -0.1)),)},
        {"passes": curve((4, 0.1), (4, 0.1))},
        {"first": -1.0},
        {"kind": "something else"},
        {"step": 3},
    ],
)
def test_what_cannot_be_costs_is_refused(tmp_path, changed):
    with pytest.raises(UserError, match="holds no costs: name a file that --costs of this version wrote"):
        read(tmp_path / "c.json", **changed)


def test_costs_of_before_batches_were_measured_are_refused(tmp_path):
    old = msgspec.to_builtins(Costs(**GOOD))
    del old["batches"]
    (tmp_path / "c.json").write_bytes(msgspec.json.encode({**old, "step_request": 0.001, "tree_request": 0.001}))
    with pytest.raises(UserError, match="of this version"):
        read_named(str(tmp_path / "c.json"), {})
