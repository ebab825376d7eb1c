"""A step decided again from its distributions."""

import numpy as np

from specscope.analyze.locate.decided import decide
from specscope.trace.record.records import FinalKind
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from tests.support import records


def test_where_the_rule_goes_on_and_nobody_computed_what_follows_the_rest_is_not_judged():
    """The engine rejected a draft that p, q and its coin accept, so p below it was never needed."""
    tree = DraftTree.build([1, 2], [ROOT, 0], [0.5, 0.5], Drawn.WITHOUT_REPLACEMENT)
    wrong = records.verdict(
        records.outcomes(2, (), (0,)),
        (),
        3,
        FinalKind.RECOVERED,
        p=[0.7, 0.1],
        p_trial=[0.7, 0.0],
        q_trial=[0.5, 0.0],
        accept_prob=[1.0, 0.0],
        coin=[0.4, 0.4],
    )
    p, q = np.array([0.1, 0.7, 0.1, 0.1]), np.array([0.2, 0.5, 0.2, 0.1])
    found = decide(wrong, tree, {ROOT: p}, {ROOT: q, 0: q})
    assert [figure.what for figure in found.figures if figure.differs] == ["outcome"]
    assert found.left is None
