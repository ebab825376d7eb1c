"""How numbers are gathered where they lie on a device: nothing waits, rows in parts, and lean evidence is cheaper."""

from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specscope.trace.inside import gather
from tests.vllm import small
from tests.vllm.small import record
from tests.vllm.test_recording import SAMPLED, assert_same_steps, requests

WAITS = ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "masked_select")


def test_nothing_waits_for_the_device():
    """No tensor becomes a number or an array while numbers are gathered: on a GPU each of these would wait."""
    waits, calls = [], []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            calls.append(name)
            masked = name in ("__getitem__", "__setitem__") and isinstance(args[1], torch.Tensor)
            if name in WAITS or (masked and args[1].dtype is torch.bool):
                waits.append(name)
            return function(*args, **(kwargs or {}))

    record(requests(), SAMPLED, gather=Watch, varied=True)
    assert len(calls) > 100
    assert waits == []


def test_rows_are_worked_on_in_parts(monkeypatch):
    """A batch of more rows than a part holds gives the same numbers."""
    whole, _, _ = record(requests(), SAMPLED, gather=nullcontext)
    monkeypatch.setattr(gather, "PART", 3 * small.V)
    for runner in ({"gather": nullcontext}, {"v2": True}):
        assert_same_steps(record(requests(), SAMPLED, **runner)[0], whole)


def test_the_first_pass_of_a_drafter_writes_no_more_than_its_rows():
    """It may be one that a graph captures: what it does is then done at each replay, to what other passes wrote."""
    written = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (small.SLOTS + 1, 3, small.V):
                written.append(function.overloadpacket.__name__)
            return out

    def run(engine):
        with Watch():
            engine.run()

    record(requests(), v2=True, run=run)
    assert written[0] == "empty"
    assert set(written[1:]) == {"index_put_"}
