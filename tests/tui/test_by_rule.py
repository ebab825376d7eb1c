"""Decisions under rules other than the standard one, where they are shown."""

import dataclasses

import numpy as np
import pytest

from specscope.speculate.verify import match, traversal
from specscope.trace.record.records import Outcome, RequestStep
from specscope.trace.record.rules import MATCH, TRAVERSAL
from specscope.trace.record.tree import ROOT, DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import draw_tree
from specscope.tui.widgets.decision import decision
from specscope.tui.widgets.tree_lines import tree_lines
from tests.speculate.verify.enumeration import batch_of, dense
from tests.trace.samples import records

from .sample import told

TREE = DraftTree.build([0, 0, 1], [ROOT, 0, ROOT])
P = [dense([0.5, 0.5]), dense([0.9, 0.1]), dense([1.0, 0.0]), dense([0.5, 0.5])]
COINS = {TRAVERSAL: [0.5, 0.99, 0.4, 0.5], MATCH: [0.5, 0.7, 0.4, 0.1]}


@pytest.fixture(params=[TRAVERSAL, MATCH])
def step(request):
    verify = traversal.verify if request.param == TRAVERSAL else match.verify
    (verdict,), _ = verify(batch_of(TREE, P, {}, COINS[request.param]))
    return RequestStep("r0", 0, 5, 0, "ngram", TREE, verdict, emitted=1)


def test_a_tree_has_the_sign_of_how_it_was_decided(step):
    _, lines, _ = tree_lines(step, step.verdict, Vocabulary(), 120, [])
    signs = [next((sign for sign in "↓=≠<≥" if f"{sign} " in told([line])), "") for line in lines]
    assert [sign for sign in signs if sign] == (["↓", "<"] if step.rule == TRAVERSAL else ["≠", "="])
    drawn = draw_tree(step, Vocabulary()).splitlines()  # with the ratio of a path that was accepted from its end
    assert ("ratio=0.5000" in drawn[1]) is (step.rule == TRAVERSAL)
    assert ("ratio" in drawn[2]) is False


def test_a_coin_that_was_held_against_nothing_is_not_on_the_line(step):
    lines = [told(decision(step, step.verdict, node, 60)[:1]) for node in step.verdict.path]
    on_the_line = ["●" in line for line in lines]
    assert on_the_line == ([False, True] if step.rule == TRAVERSAL else [False])
    assert ("below ↓ a" in lines[0]) is (step.rule == TRAVERSAL)


def test_no_coin_is_shown_where_none_was_tossed():
    """Another engine tosses none for a greedy request."""
    parts = [part for record in records() for part in record.requests]
    step = next(part for part in parts if part.verdict is not None and len(part.tree))
    verdict = dataclasses.replace(step.verdict, coin=np.zeros(len(step.tree)), final_coin=0.0)
    bare = dataclasses.replace(step, verdict=verdict)
    tried = int(np.flatnonzero(verdict.outcome != Outcome.UNTRIED)[0])
    said = told(decision(bare, verdict, tried, 100))
    assert "●" not in said
    assert "none  a" in said
    head, lines, _ = tree_lines(bare, verdict, Vocabulary(), 110, [])
    text = told([head, *lines])
    assert "●" not in text
    assert " – " in text
    assert "u=" not in draw_tree(bare, Vocabulary())
    assert "u=" in draw_tree(step, Vocabulary())
