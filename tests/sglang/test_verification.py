"""A verification's tensors: links of trees, and that nothing on a device is waited for."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from specscope.sglang.verification import Verification, VerifierResult
from specscope.trace.inside import gathered, trees
from tests.sglang import kernels, stand


@st.composite
def parents(draw):
    """[n] the parent's slot of each slot; the root is its own, and so is a slot that nothing leads to."""
    size = draw(st.integers(1, 20))
    return [0, *(draw(st.integers(0, slot - 1)) for slot in range(1, size))]


def links(parent):
    """(The first child of each slot, the next sibling)."""
    children = {slot: [c for c in range(1, len(parent)) if parent[c] == slot] for slot in range(len(parent))}
    first = [(children[slot] or [-1])[0] for slot in range(len(parent))]
    sibling = [-1] * len(parent)
    for kin in children.values():
        for elder, younger in itertools.pairwise(kin):
            sibling[elder] = younger
    return first, sibling


@given(st.lists(parents(), min_size=1, max_size=4))
@example([[0, 0, *[1] * 18]])  # many siblings, not of the root
def test_parents_follow_from_links(batch):
    size = min(map(len, batch))
    batch = [parent[:size] for parent in batch]
    first, sibling = (torch.tensor(each) for each in zip(*map(links, batch), strict=True))
    assert trees.slots_above(first, sibling).tolist() == batch


def seen(device, vocabulary=7, batch=3, tree=True):
    parent = [0, 0, 0, 1, 1, 2] if tree else [0, 0, 1, 2]
    n = len(parent)
    first, sibling = (torch.tensor(each, device=device).repeat(batch, 1) for each in links(parent))
    logits = torch.randn(batch * n, vocabulary, device=device)
    made = Verification(
        rids=tuple("abc"[:batch]),
        candidates=torch.randint(vocabulary, (batch, n), device=device),
        first_child=first if tree else None,
        next_sibling=sibling if tree else None,
        context=torch.full((batch,), 9, device=device),
        raw=logits,
        logits=logits,
        greedy=torch.zeros(batch, dtype=torch.bool, device=device),
        full=True,
    )
    written = stand.room(made.candidates, 3 if tree else n)
    called = {
        **dict(zip(("predicts", "accept_index", "accept_token_num"), written, strict=True)),
        "uniform_samples": torch.rand(batch, n, device=device),
        "uniform_samples_for_final_sampling": torch.rand(batch, device=device),
        "target_probs": logits.softmax(-1).view(batch, n, -1),
        "draft_probs": torch.zeros(batch, n if tree else n - 1, vocabulary, device=device),
    }
    return made, called


class NoCopies(TorchFunctionMode):
    """Refuses what takes a tensor from its device to the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and args and on_device(args[0]):
            raise RuntimeError(f"{func} copied to the host")
        return result


def on_device(value):
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(each, torch.Tensor) and each.device.type == "cuda" for each in values)


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("way", ["sampled", "block", "greedy"])
def test_nothing_waits_for_the_device_before_the_result_is_taken(monkeypatch, tree, way):
    """Tensors of a device that is not there: whatever asks one of them for its numbers raises."""
    copied = []

    def noted(packed):
        assert packed.device.type == "cuda"
        copied.append(packed.numel())
        return packed, None

    monkeypatch.setattr(gathered, "to_host", noted)
    with FakeTensorMode(), NoCopies():
        made, called = seen("cuda", tree=tree)
        outcome = VerifierResult(called["accept_token_num"], called["accept_index"], called["predicts"])
        if way == "greedy":
            made.chosen(outcome)
        else:
            made.sampled(called | {"block_verification": way == "block"}, chain=not tree)
        made.scores = torch.rand(*(made.candidates[:, 1:].shape), device="cuda")
        made.ended(outcome)
        for waits in (lambda: made.candidates.tolist(), lambda: made.candidates.cpu()):  # this test can fail
            with pytest.raises((DataDependentOutputException, RuntimeError)):
                waits()
    assert len(copied) == 2  # what evidence needs, and the outcome


def judged_tree():
    made, called = seen("cpu")
    n = made.candidates.shape[1]
    made.candidates[:] = torch.tensor([0, 1, 2, 3, 4, 5])
    index = torch.arange(len(made.candidates) * n).view(-1, n)
    kernels.target_only(
        **called,
        candidates=made.candidates,
        retrive_index=index,
        retrive_next_token=made.first_child,
        retrive_next_sibling=made.next_sibling,
    )
    made.sampled(called, chain=False)
    return made, VerifierResult(called["accept_token_num"], called["accept_index"], called["predicts"])


def test_numbers_that_contradict_each_other_are_refused():
    made, outcome = judged_tree()
    made.ended(outcome)
    assert len(made.judged()) == 3
    made, outcome = judged_tree()
    far = dataclasses.replace(outcome, accepted=torch.full((3,), 2), index=torch.tensor([[0, 3, 1]] * 3))
    made.ended(far)
    with pytest.raises(trees.VerificationError):
        made.judged()
    made, outcome = judged_tree()
    made.first_child = made.first_child.clone()
    made.first_child[:, 1] = 0  # a circle
    made.ended(outcome)
    with pytest.raises(trees.VerificationError, match="cycle"):
        made.judged()
