"""Margins: how far p would have to move for another decision, and which decisions rounding could flip."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.debug.forked import Forked
from specscope.speculate.verify import host
from specscope.speculate.verify.distribution import draw
from specscope.testing.enumeration import dense
from specscope.trace.record.records import RequestStep
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from tests.speculate.verify.enumeration import batch_of

COIN = st.floats(0.001, 0.999)
ROWS = st.integers(0, 10_000).map(lambda seed: np.random.default_rng(seed).dirichlet(np.full(5, 0.7)))


def drawn(row, coin):
    token, _, margin = draw(dense(row), coin)
    return token, margin


@given(ROWS, COIN)
def test_another_token_needs_the_margin_and_no_less(row, coin):
    token, margin = drawn(row, coin)
    others = [i for i in range(5) if i != token]
    outcomes = {}
    for share in (0.999, 1.001):
        moved = share * margin
        for giver in [i for i in range(5) if row[i] >= moved]:
            for taker in others if giver == token else range(5):
                other = row.copy()
                other[giver] -= moved
                other[taker] += moved
                outcomes.setdefault(share, set()).add(drawn(other, coin)[0])
    assert outcomes.get(0.999, {token}) == {token}
    if any(row[i] >= 1.001 * margin for i in range(5)) and margin < 1:
        below = coin - row[:token].sum()
        neighbour = token - 1 if below <= margin * 1.0001 else token + 1
        if row[neighbour] >= 1.001 * margin or row[token] >= 1.001 * margin:
            assert outcomes[1.001] != {token}


def test_what_is_certain_has_no_margin():
    assert drawn([0.0, 1.0, 0.0], 1e-9) == (1, 1.0)
    assert drawn([0.5, 0.5], 0.499)[1] == pytest.approx(0.001)
    assert drawn([0.5, 0.5], 1e-9)[1] == pytest.approx(0.5)  # below the first token there is none


def judged(p, coin, q=None, how=Drawn.DETERMINISTIC, forced=None):
    tree = DraftTree.build([0], [-1], None if q is None else [q[0]], how)
    own = {} if q is None else {-1: dense(q)}
    return host.verify(batch_of(tree, [dense(p)] * 2, own, [0.5, coin], forced))[0][0]


@given(ROWS, ROWS, COIN, st.booleans())
def test_another_outcome_needs_the_margin_and_no_less(row, q, coin, sampled):
    q, how = (q, Drawn.WITHOUT_REPLACEMENT) if sampled else (None, Drawn.DETERMINISTIC)
    verdict = judged(row, coin, q, how)
    margin = float(verdict.margin[0])
    for share, same in ((0.999, True), (1.001, False)):
        for way in (-1, 1):
            other = row.copy()
            other[0] += way * share * margin
            other[1:] *= (1 - other[0]) / row[1:].sum()
            if 0 < other[0] < 1:
                outcome = judged(other, coin, q, how).outcome[0]
                if same:
                    assert outcome == verdict.outcome[0]
                elif way == (1 if verdict.outcome[0] == 2 else -1):
                    assert outcome != verdict.outcome[0]


def test_near_ties_follow_the_dtype():
    verdict = judged([0.3, 0.7], 0.3 + 1e-6)
    assert verdict.near_ties("float32") == [0]
    assert judged([0.3, 0.7], 0.301).near_ties("float32") == []
    assert judged([0.3, 0.7], 0.301).near_ties("bfloat16") == [0]
    assert judged([0.3, 0.7], 0.3 + 1e-6, forced={0: True}).near_ties("float32") == []
    assert judged([0.3, 0.7], 0.3 + 1e-6).near_ties("another") == []
    final = dataclasses.replace(judged([0.3, 0.7], 0.9), final_margin=ROUNDING["float32"] / 2)
    assert final.near_ties("float32") == [1]


def test_a_difference_that_begins_at_a_near_tie_is_called_that():
    def step(token, margin):
        verdict = dataclasses.replace(judged([0.3, 0.7], 0.9), token=token, final_margin=margin)
        tree = DraftTree.build([0], [-1])
        return RequestStep("r0", 0, 4, 0, "ngram", tree, verdict, emitted=1)

    for margin, near in ((2e-6, True), (0.2, False)):
        forked = Forked("r0", 0, "", (step(1, margin),), (step(2, margin),), 1, "float32", forced=False)
        assert forked.near_tie is near
        assert ("near tie" in forked.describe(Vocabulary())) is near
