"""What is read of sampled rows: tokens that the cuts leave, and the parameters of drafted rows."""

import torch

from specscope.measure.locate.tapped import TARGET, Fed, FedText, TappedForward, choices, parameters
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import DraftTree
from tests.support import records as made

NONE = DraftTree.build([], [])
LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])


def fed(tensors=None, drafts=((7, 7), (7, 7)), tokens=()):
    """Rows of the second of two requests, behind which tokens were committed."""
    text = FedText("b", 5, [0] * 5 + [*tokens], [5], [5 + len(tokens)], [made.part("b", NONE, None)], [0])
    forward = TappedForward(0, TARGET, 0, 0, ("a", "b"), (3, 3), (4, 4), drafts, ((1,), (2,)), tensors or {})
    rows = torch.arange(3)
    return Fed(forward, text, 0, rows + 3, rows + 4, rows, 0, 3, True)


def left(params, tokens):
    """Which of two tokens committed behind the first two rows are said to be wrong."""
    both = torch.tensor([0, 1])
    (pair,) = choices(fed(tokens=tokens), both, both, params, LOGITS)
    return pair.errors.bool()[:, 0].tolist()


def test_a_token_that_top_k_or_top_p_leaves_out_cannot_have_been_drawn():
    assert left(SamplingParams(1.0), [3, 0]) == [False, False]
    assert left(SamplingParams(1.0, top_k=2), [1, 1]) == [False, True]
    # of 0.64, 0.24, 0.09, 0.03 the first two reach 0.8
    assert left(SamplingParams(1.0, top_p=0.8), [1, 1]) == [False, True]
    assert left(SamplingParams(1.0, top_p=0.6), [1, 3]) == [True, False]
    assert left(SamplingParams(2.0, top_p=0.6), [1, 3]) == [False, False]  # warmer, it takes two to reach 0.6


def test_drafted_rows_have_the_parameters_of_their_request():
    tensors = {
        "parameters.0.rows": torch.tensor([0.5, 0.5, 0.9, 123.0]),
        "parameters.0.of": torch.tensor([0.5, 0.9]),
        "parameters.0.ends": torch.tensor([2, 4]),
    }
    (pair,) = parameters(fed(tensors))
    assert pair.errors.tolist() == [[0], [1]]
    assert [row.position for row in pair.rows] == [4, 5]  # what judges a draft is the row before it
