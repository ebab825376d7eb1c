"""Another engine tosses no coin for a greedy request: screens then show none."""

import dataclasses

import numpy as np

from specscope.trace.record.records import Outcome
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import draw_tree
from specscope.tui.widgets.decision import decision
from specscope.tui.widgets.tree_lines import tree_lines
from tests.trace.samples import records


def test_no_coin_is_shown_where_none_was_tossed():
    parts = [part for record in records() for part in record.requests]
    step = next(part for part in parts if part.verdict is not None and len(part.tree))
    verdict = dataclasses.replace(step.verdict, coin=np.zeros(len(step.tree)), final_coin=0.0)
    bare = dataclasses.replace(step, verdict=verdict)
    tried = int(np.flatnonzero(verdict.outcome != Outcome.UNTRIED)[0])
    told = "".join(text for line in decision(bare, verdict, tried, 100) for text, _ in line)
    assert "●" not in told
    assert "none  a" in told
    head, lines, _ = tree_lines(bare, verdict, Vocabulary(), 110, [])
    text = "\n".join("".join(text for text, _ in line) for line in [head, *lines])
    assert "●" not in text
    assert " – " in text
    assert "u=" not in draw_tree(bare, Vocabulary())
    assert "u=" in draw_tree(step, Vocabulary())
