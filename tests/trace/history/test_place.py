"""How a coin stands to its a, by rule; ratios of paths from a step's evidence; the texts of the likeliest tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.speculate.sampling import TargetRows
from specscope.speculate.verify import match, traversal
from specscope.speculate.verify.inputs import VerifyBatch
from specscope.trace.history.place import coin_sign, ratios
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import Encoder
from tests.speculate.verify.enumeration import dense
from tests.speculate.verify.test_rules import batch_of
from tests.speculate.verify.test_verify import random_input
from tests.trace.wire.test_spans import decode

TREE = DraftTree.build([0, 0, 1], [ROOT, 0, ROOT])
P = [dense([0.5, 0.5]), dense([0.9, 0.1]), dense([1.0, 0.0]), dense([0.5, 0.5])]


def test_how_a_coin_stands_to_its_a():
    """A node that was accepted for one below it had no say; under match the coin draws."""
    (found,), _ = traversal.verify(batch_of(TREE, P, {}, [0.5, 0.99, 0.4, 0.5]))
    assert (found.path.tolist(), [coin_sign(found, node) for node in (0, 1)]) == ([0, 1], ["↓", "<"])
    (found,), _ = match.verify(batch_of(TREE, P, {}, [0.5, 0.7, 0.4, 0.1]))
    assert (found.path.tolist(), [coin_sign(found, node) for node in (0, 2)]) == ([2], ["≠", "="])
    assert found.coin[0] == found.coin[2] == 0.7


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(Drawn)))
def test_ratios_follow_from_the_evidence(seed, drawn):
    """What each coin was held against comes out again from p and q as tried and the residuals' masses."""
    one, p = random_input(np.random.default_rng(seed), drawn, False, 0.0)
    rows = torch.stack([row.probs for row in p])
    (found,), _ = traversal.verify(VerifyBatch.build([one], TargetRows(torch.zeros(0, dtype=torch.int64), rows)))
    again = ratios(one.tree, found)
    for node in np.flatnonzero(found.judged):
        assert again.left[node] == pytest.approx(found.accept_prob[node], abs=1e-5, rel=1e-4)
    for node in found.path[:-1]:
        assert again.own[node] == pytest.approx(found.accept_prob[node], abs=1e-5, rel=1e-4)
    untried = found.outcome == Outcome.UNTRIED
    assert not again.own[untried].any()


TRACES = Path(__file__).parents[3] / "traces"


def eagle_step():
    """(history, r2@24)."""
    history = read_capture(TRACES / "eagle.jsonl").history
    request = history.requests["r2"]
    return history, request.steps[request.place_of(24)]


def test_the_likeliest_tokens_come_with_their_texts():
    """Of a run that does not keep text, test_privacy.py."""
    history, step = eagle_step()
    encoder = Encoder(history.run, history.vocabulary)
    decoder, back = decode([span for record in history.steps for span in encoder.encode(record)])
    assert len(back) == len(history.steps)
    named = step.parents.named([*step.tree.token.tolist(), step.verdict.token])
    assert named
    assert 327 not in named  # the final token has its text in the tree
    assert {token: decoder.vocabulary.pieces.get(token) for token in named} == {
        token: history.vocabulary.pieces[token] for token in named
    }


def test_texts_that_are_not_as_many_as_their_tokens_are_damage():
    history, _ = eagle_step()
    encoder = Encoder(history.run, history.vocabulary)
    spans = [span for record in history.steps for span in encoder.encode(record)]
    first = next(span for span in spans if '"text":["' in str(span.attributes.get("specscope.parents")))
    first.attributes["specscope.parents"] = first.attributes["specscope.parents"].replace('"text":["', '"text":["x","')
    decoder, _ = decode(spans)
    assert any("specscope.parents" in line and "texts for" in line for line in decoder.faults.lines())
