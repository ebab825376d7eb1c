"""What V2's drafter chose greedy drafts by, around stand-ins that call what vLLM's speculators call."""

import types

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.record.tree import Drawn
from specscope.vllm.v2.scores import DraftLogits
from tests.vllm.random_calls import call
from tests.vllm.test_v2_rows import numbers, verified

SLOTS, K, V = 4, 3, 7


class DraftModelSpeculator:
    """S33/v1/worker/gpu/spec_decode/speculator.py"""

    max_num_reqs, num_speculative_steps = SLOTS, K

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        return hidden_states

    def sample_draft(
        self,
        hidden_states,
        sample_src_positions,
        idx_mapping,
        temperature,
        seeds,
        draft_step,
        draft_logits,
        spec_step_idx=0,
        num_steps=1,
    ):
        return self.compute_draft_logits(hidden_states, spec_step_idx).argmax(-1)


class OfModules(DraftModelSpeculator):
    """S33/v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py: it has its own."""

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        return hidden_states + spec_step_idx


@pytest.fixture
def hooked():
    """(Hooks in the class, what they keep.)"""
    before = DraftModelSpeculator.sample_draft
    guard = ErrorGuard()
    scores = DraftLogits(guard, lambda: True)
    scores.install(types.SimpleNamespace(DraftModelSpeculator=DraftModelSpeculator))
    yield scores
    DraftModelSpeculator.sample_draft = before
    assert guard.errors == 0


def logits(seed, rows):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def test_each_pass_is_kept_by_slot_and_depth(hooked):
    """The pass of a depth comes with one number of it, and rows that pad a batch have slot -1."""
    speculator, slots = DraftModelSpeculator(), torch.tensor([2, 0, -1], dtype=torch.int32)
    for depth in range(K):
        speculator.sample_draft(logits(depth, 3), None, slots, None, None, torch.tensor(depth), None)
        hooked.tensor[[1, 3]] = 7.0
    for depth in range(K):
        assert torch.equal(hooked.tensor[[2, 0, SLOTS], depth], logits(depth, 3))
    assert (hooked.tensor[[1, 3]] == 7.0).all()


def test_the_first_pass_writes_no_more_than_its_rows(hooked):
    """It may be one that a graph captures: what it does is then done at each replay, to what other passes wrote."""
    written = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            written.append((func.overloadpacket.__name__, out.shape if isinstance(out, torch.Tensor) else None))
            return out

    rows = logits(0, 1)
    with Watch():
        DraftModelSpeculator().sample_draft(rows, None, torch.tensor([2]), None, None, torch.tensor(0), None)
    whole = [name for name, shape in written if shape == hooked.tensor.shape]
    assert whole == ["empty", "index_put_"]


def test_a_block_drafter_drafts_all_depths_in_one_pass(hooked):
    slots, depths = torch.tensor([1, 1, 1, 3, 3, 3]), torch.tensor([0, 1, 2, 0, 1, 2])
    DraftModelSpeculator().sample_draft(logits(9, 6), None, slots, None, None, draft_step=depths, draft_logits=None)
    assert torch.equal(hooked.tensor[[1, 3]].reshape(6, V), logits(9, 6))


def test_a_speculator_with_logits_of_its_own_kind(hooked):
    speculator, slots = OfModules(), torch.tensor([0])
    for depth in range(2):
        speculator.sample_draft(logits(1, 1), None, slots, None, None, torch.tensor(depth), None, spec_step_idx=depth)
    assert torch.equal(hooked.tensor[0, :2], torch.cat([logits(1, 1), logits(1, 1) + 1]))


def test_vllm_keeps_those_of_sampled_drafts_itself(hooked):
    own = torch.zeros(SLOTS, K, V)
    DraftModelSpeculator().sample_draft(logits(1, 1), None, torch.tensor([0]), None, None, torch.tensor(0), own)
    assert hooked.tensor is None


def test_greedy_drafts_have_scores_and_their_q_is_a_point_mass():
    """What the rule used and what the drafter thought are two things."""
    made = call(5, [2, 1], [0.8, 0.0], tokens=12, draft_probs=False)
    drafter = torch.randn(8, 2, 12, generator=torch.Generator().manual_seed(1))
    call_of = verified(made, [0.8, 0.0], scores=drafter)
    for request, judged in enumerate(numbers(call_of)):
        tokens = judged.tree.token
        q = drafter[call_of.idx_mapping[request], : len(tokens)].softmax(1)
        np.testing.assert_allclose(
            judged.notes.prob, q.gather(1, torch.tensor(tokens)[:, None].long())[:, 0], rtol=1e-5
        )
        assert judged.tree.q.tolist() == [1.0] * len(tokens)
        assert (judged.tree.drawn == Drawn.DETERMINISTIC).all()
        assert (judged.parents.draft_top[:, 0] == q.argmax(1)[: len(judged.parents.node)].numpy()).all()
