"""Host and device, two implementations of one function of the batch, against the oracle of single distributions."""

import pytest
import torch

from specscope.model.places import Backend
from specscope.speculate import sampling
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.verify.batch import step_batch
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import ROOT, DraftTree
from tests.kernels import DEVICE
from tests.speculate.reads import Reads

VOCAB = 11


def parts(logits, temperatures, **params):
    """Chains of one node for requests whose logits are neighbours."""
    tree = DraftTree.build([1], [ROOT])
    return [
        (Context("r", [5, 6, 7], 2, SamplingParams(temperature=t, **params)), Draft(tree), rows)
        for t, rows in zip(temperatures, logits.split(2), strict=True)
    ]


@pytest.mark.parametrize("backend", list(Backend))
def test_a_batch_has_choices_for_greedy_rows_and_probabilities_for_the_others(backend):
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    batch = step_batch(parts(logits, [0, 0.5, 2.0, 0]))
    assert batch.trees.greedy.tolist() == [True, False, False, True]
    assert batch.target.choices.tolist() == logits[[0, 1, 6, 7]].argmax(-1).tolist()
    heat = torch.tensor([[0.5], [0.5], [2.0], [2.0]], device=DEVICE)
    torch.testing.assert_close(batch.target.p, (logits[2:6] / heat).softmax(-1))
    assert batch.trees.p_row.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_fork_changes_coins_outcomes_and_the_final_token_at_its_position_alone():
    changes = Changes(outcomes={(2, 0): True, (3, 0): False}, coins={(2, 0): 0.25, (2, 9): 0.5}, tokens={2: 8})
    batch = step_batch(parts(torch.randn(2, VOCAB), [0.7]), changes)
    assert batch.trees.forced.tolist() == [0, Outcome.ACCEPTED]
    assert (batch.trees.coin[1], batch.trees.final.tolist()) == (0.25, [8])


@pytest.mark.parametrize("temperatures", [[0, 0, 0], [0.5, 1.0, 0.7], [0, 0.5, 0]])
def test_a_batch_is_made_for_the_device_without_a_read(monkeypatch, temperatures):
    """Bias and penalties too. Its one read is Verdicts.to_host."""
    logits = torch.randn(6, VOCAB)
    asked = parts(logits, temperatures, logit_bias={3: 2.0}, repetition_penalty=1.2, frequency_penalty=0.5)
    monkeypatch.setattr(sampling, "argmax", lambda rows: rows.argmax(-1))  # as it is where there is a GPU
    reads = Reads(monkeypatch)
    batch = step_batch(asked)
    assert reads.count == 0
    batch.trees.on(torch.device("cpu"))
    assert reads.count == 1  # of a buffer on the host, which one copy takes to the device
