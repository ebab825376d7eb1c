"""Host and device, two implementations of one function of the batch, against the oracle of single distributions."""

import pytest
import torch

from specscope.speculate import sampling
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.verify.batch import step_batch
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import ROOT, DraftTree

VOCAB = 11


class Reads:
    """Counts what takes a number from a tensor to Python: on a device each is a wait."""

    names = ("tolist", "item", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self, monkeypatch):
        self.count = 0
        for name in self.names:
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, method):
        def call(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return call


def parts(logits, temperatures, **params):
    """Chains of one node for requests whose logits are neighbours."""
    tree = DraftTree.build([1], [ROOT])
    return [
        (Context("r", [5, 6, 7], 2, SamplingParams(temperature=t, **params)), Draft(tree), rows)
        for t, rows in zip(temperatures, logits.split(2), strict=True)
    ]


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
