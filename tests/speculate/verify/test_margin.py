"""Margins: how far p would have to move for another decision, and which decisions rounding could flip."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.verify import host
from specscope.speculate.verify.distribution import Residual
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import DraftTree, Drawn
from tests.speculate.verify.enumeration import batch_of, dense

COIN = st.floats(0.001, 0.999)
ROWS = st.integers(0, 10_000).map(lambda seed: np.random.default_rng(seed).dirichlet(np.full(5, 0.7)))


def drawn(row, coin):
    token, _, margin = Residual(dense(row)).draw(coin)
    return token, margin


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
