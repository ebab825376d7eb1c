"""Looking at steps and forking them under rules other than the standard one."""

from types import SimpleNamespace

import pytest

from specscope.errors import UserError
from specscope.live.inspect import _left
from specscope.live.local import EngineWhatIf
from specscope.speculate.drafters.base import Draft
from specscope.speculate.verify import traversal
from specscope.speculate.verify.distribution import Residual
from specscope.trace.record.rules import MATCH, STANDARD
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from tests.speculate.verify.enumeration import batch_of, dense


def test_p_where_nothing_is_left_of_it_is_what_the_engine_drew_from():
    """p equals q below a node of ratio 0.4: the scaled p has nothing beyond q, and the rule goes back to p itself."""
    row, first = dense([0.5, 0.3, 0.2]), dense([0.2, 0.5, 0.3])
    tree = DraftTree.build([0, 0], [ROOT, 0], drawn=Drawn.WITH_REPLACEMENT)
    q = {ROOT: dense([0.5, 0.25, 0.25]), 0: row}
    (verdict,), (drawn_from,) = traversal.verify(batch_of(tree, [first, row, row], q, [0.5, 1e-9, 0.99]))
    assert verdict.path.tolist() in ([0], [])
    seen = SimpleNamespace(draft=Draft(tree, q), verdict=verdict, target=lambda above: Residual(row))
    left = _left(seen, 0)
    assert float(left.row.sum()) == pytest.approx(1)
    if verdict.path.tolist() == [0]:
        assert left.row.tolist() == pytest.approx(drawn_from.row.tolist())


def test_under_match_a_coin_is_given_to_the_sibling_that_has_it():
    part = SimpleNamespace(tree=DraftTree.build([1, 2, 3], [ROOT, ROOT, 0]))
    what_if = EngineWhatIf(SimpleNamespace(config=SimpleNamespace(rule=MATCH)))
    what_if._check_coins({"engine": {}, "coins": {(5, 0): 0.2, (5, 2): 0.1}}, part)
    with pytest.raises(UserError, match="siblings share the coin of node 0"):
        what_if._check_coins({"engine": {}, "coins": {(5, 1): 0.2}}, part)
    what_if._check_coins({"engine": {"rule": STANDARD}, "coins": {(5, 1): 0.2}}, part)
