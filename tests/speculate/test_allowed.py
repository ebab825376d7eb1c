"""Which tokens may follow: bits, masks, and the least length along a path."""

import numpy as np
import pytest
import torch

from specscope.speculate.allowed import Allowed, allows, unpacked
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.drafters.text import pruned
from specscope.speculate.sampling import LogitRows, all_probabilities
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import ROOT, DraftTree

V = 77  # not a multiple of 32


def test_bits_are_tokens():
    allowed = Allowed(V, (0, 31, 32, 63, 76), min_tokens=1)
    (row,) = allowed.rows([], [[]])
    assert np.flatnonzero(~unpacked(row[None], V)[0]).tolist() == [0, 31, 32, 63, 76]
    assert [allows(row, token) for token in (0, 1, 31, 32, 33, 76)] == [False, True, False, False, True, False]


def test_the_least_length_counts_output_and_path():
    allowed = Allowed(V, (2,), min_tokens=3)
    rows = allowed.rows([5], [[], [6], [6, 7], [6, 7, 8]])
    assert [allows(row, 2) for row in rows] == [False, False, True, True]
    assert allowed.rows([5, 6, 7], [[]]) is None  # all may come: nothing is computed


@pytest.mark.parametrize("kind", [{}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.4}])
def test_what_is_refused_has_no_mass_and_the_rest_keeps_its_shares(kind):
    torch.manual_seed(1)
    logits, refused = torch.randn(3, V), np.random.default_rng(1).random((3, V)) < 0.6
    packed = np.packbits(~refused, axis=1, bitorder="little")
    rows = np.zeros((3, 12), np.uint8)
    rows[:, : packed.shape[1]] = packed
    params = SamplingParams(temperature=0.8, **kind)
    part = LogitRows(logits, params, paths=[[], [], []], allowed=rows.view(np.int32))
    p = all_probabilities([part])
    assert float(p[torch.from_numpy(refused)].sum()) == 0
    assert p.sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    wanted = all_probabilities([LogitRows(logits.masked_fill(torch.from_numpy(refused), -1e9), params, paths=[[]] * 3)])
    assert torch.allclose(p, wanted, atol=1e-6)
    assert torch.equal(logits, logits.clone())


def test_pruning_keeps_what_may_come_behind_its_own_path():
    """EOS at the root is refused, and all below it; two deep it may come."""
    tree = DraftTree.build([2, 5, 6, 2, 7], [ROOT, ROOT, 0, 1, 1])
    draft = Draft(tree, method=MethodNotes(confidence=np.linspace(0.9, 0.1, 5, dtype=np.float32)))
    context = Context("r", [9, 9], 2, SamplingParams(min_tokens=1), allowed=Allowed(V, (2,), min_tokens=1))
    left = pruned(draft, context)
    assert left.tree.token.tolist() == [5, 2, 7]
    assert left.tree.parent.tolist() == [ROOT, 0, 0]
    assert left.pruned == 2
    assert left.method.confidence.tolist() == pytest.approx([0.7, 0.3, 0.1])
    assert pruned(draft, Context("r", [9, 9], 2, SamplingParams())) is draft
