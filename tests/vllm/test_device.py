"""What is gathered on a device is what is read on the host: of the same tensors, the same evidence."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specscope.trace.inside import gather as device
from specscope.trace.inside.gather import gather
from specscope.trace.inside.gathered import read
from specscope.trace.record.notes import TOP
from specscope.vllm.v1.rows import rows_of
from tests.vllm.judging import judge
from tests.vllm.random_calls import call

NO_SCORES = ((), 0)


def passes(seed, depth, requests, tokens, *, known=1.0):
    """A drafter's passes over the requests; tokens that it does not know have minus infinity."""
    rng = torch.Generator().manual_seed(seed)
    unknown = torch.rand(tokens, generator=rng) > known
    unknown[:4] = False  # as many as the notes hold
    made = [2 * torch.randn(requests, tokens, generator=rng) for _ in range(depth)]
    return [one.masked_fill(unknown, -torch.inf) for one in made]


def assert_same(a, b, at):
    """Dataclasses of numbers and arrays: integers are equal, floats but for rounding."""
    if dataclasses.is_dataclass(a):
        assert type(a) is type(b), at
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name), f"{at}.{field.name}")
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=at)
    elif isinstance(a, tuple):
        assert len(a) == len(b), at
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{at}[{place}]")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=2e-5, abs=2e-6, nan_ok=True), at
    else:
        assert a == b, at


def both(made, drafter, *, full=True):
    """The evidence of each request, as the host and as a device read it."""
    requests = range(len(made.drafted))
    own = [[one[row] for one in some] for some, row in drafter]
    host = [judge(made, request, own[request] if full else [], full=full) for request in requests]
    gathered = gather(rows_of(made, drafter), full=full)
    return host, read(gathered.tables())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    requests=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.0, 0.7, 1.3])), min_size=1, max_size=5),
    tokens=st.sampled_from([3, 9, 50]),
    draft_probs=st.booleans(),
    top_p=st.sampled_from([None, 0.6]),
    invalid=st.sampled_from([0.0, 0.5]),
    scores=st.sampled_from([None, 1.0, 0.6]),
    full=st.booleans(),
)
def test_device_reads_what_the_host_reads(seed, requests, tokens, draft_probs, top_p, invalid, scores, full):
    drafted, heat = [n for n, _ in requests], [temperature for _, temperature in requests]
    made = call(seed, drafted, heat, tokens=tokens, draft_probs=draft_probs, top_p=top_p, invalid=invalid)
    drafter = [NO_SCORES for _ in drafted]
    if scores is not None:  # rows of the drafter's batch are in another order; one request is new to it
        own = passes(seed, max(drafted), len(drafted), tokens, known=scores)
        drafter = [(own, len(drafted) - 1 - row) if row != 1 else NO_SCORES for row in range(len(drafted))]
    for request, (host, there) in enumerate(zip(*both(made, drafter, full=full), strict=True)):
        assert_same(host, there, f"request {request}")


@pytest.mark.parametrize("heat", [[0.0, 0.0], [0.8, 0.0], [0.8, 1.2]])
def test_logits_that_are_no_numbers_are_read_alike(heat):
    made = call(7, [3, 2], heat, tokens=20, draft_probs=True)
    for row in (0, 3):
        made.target_logits[row] = made.logits[made.target_rows[row]] = torch.nan
        if made.target_probs is not None:
            made.target_probs[row] = torch.nan
    for request, (host, there) in enumerate(zip(*both(made, [NO_SCORES, NO_SCORES]), strict=True)):
        assert np.isnan(host.verdict.p[0])
        for one in (host, there):
            one.parents.top[np.isnan(one.parents.top_p)] = 0  # which tokens come first there means nothing
        assert_same(host, there, f"request {request}")


def test_rows_are_worked_on_in_parts(monkeypatch):
    """A batch of more rows than a part holds gives the same numbers."""
    made = call(5, [4, 3, 5, 0], [0.8, 0.0, 1.0, 0.7], tokens=20, draft_probs=True)
    drafter = [(passes(1, 5, 4, 20), row) for row in range(4)]
    whole = gather(rows_of(made, drafter), full=True)
    monkeypatch.setattr(device, "PART", 3 * 20)
    parts = gather(rows_of(made, drafter), full=True)
    for there, here in zip(read(whole.tables()), read(parts.tables()), strict=True):
        assert_same(there, here, "parts")


def test_bytes_are_counted():
    """Some tens of numbers a row, however many tokens there are."""
    drafted = [3, 3, 5]
    calls = [call(1, drafted, [0.8] * 3, tokens=tokens) for tokens in (50, 5000)]
    small, large = (gather(rows_of(made, []), full=True).sent.bytes for made in calls)
    rows, requests = sum(drafted), len(drafted)
    assert small == large == rows * (8 * (3 + TOP) + 4 * (5 + TOP) + 8) + requests * (8 * 4 + 1 + 4 * 5)


@pytest.mark.parametrize(
    ("heat", "draft_probs", "floats"), [(0.0, False, (1, 0)), (0.8, False, (3, 2)), (0.8, True, (4, 2))]
)
def test_lean_evidence_copies_only_what_it_gathered(heat, draft_probs, floats):
    """Token, choice and p of a row, its coin and q; of a request its rows, its outcome and the final draw."""
    drafted = [3, 3, 5]
    made = call(1, drafted, [heat] * 3, tokens=50, draft_probs=draft_probs)
    scores = [(passes(1, 5, 3, 50), row) for row in range(3)]
    of_row, of_request = 8 * 2 + 4 * floats[0], 8 * 4 + 1 + 4 * floats[1]
    copied = gather(rows_of(made, scores), full=False).sent.bytes
    assert copied == sum(drafted) * of_row + len(drafted) * of_request


def work(made, drafter, *, full):
    """(operations on whole rows of the vocabulary, all operations) of one call: on a GPU each is a launch or more."""
    wide, every = [], []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            shapes = [value.shape for value in (*args, out) if isinstance(value, torch.Tensor)]
            if not function.is_view:
                every.append(function)
                wide.extend([function] if any(shape[-1:] == (50,) for shape in shapes) else [])
            return out

    with Count():
        gather(rows_of(made, drafter), full=full)
    return len(wide), len(every)


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_lean_evidence_does_a_part_of_the_work(heat):
    made = call(1, [3, 3, 5], [heat] * 3, tokens=50, draft_probs=heat > 0)
    scores = [(passes(1, 5, 3, 50), row) for row in range(3)]
    lean, full = (work(made, scores, full=every) for every in (False, True))
    assert lean[0] < full[0] / 2
    assert lean[1] < full[1] / 2


def test_nothing_waits_for_the_device():
    """No tensor becomes a number or an array while numbers are gathered: on a GPU each of these would wait."""
    made = call(3, [3, 0, 4], [0.8, 0.0, 1.2], tokens=30, draft_probs=True)
    drafter = [(passes(1, 4, 3, 30), row) for row in range(3)]
    waits = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            if name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "masked_select"):
                waits.append(name)
            indexed = name in ("__getitem__", "__setitem__") and isinstance(args[1], torch.Tensor)
            if indexed and args[1].dtype is torch.bool:
                waits.append(f"{name} with a mask")
            return function(*args, **(kwargs or {}))

    with Watch():
        gather(rows_of(made, drafter), full=True)
    assert waits == []
