"""Where a text drafts beside a model, the tree says whose node each one is."""

from __future__ import annotations

import dataclasses

import numpy as np

from specscope.trace.history.wording import about_draft, about_method
from specscope.trace.record.notes import SOURCES, MethodNotes
from specscope.trace.record.records import DraftNotes
from specscope.trace.record.tree import Drawn
from specscope.trace.words import draw_tree

from .sample import replay


def combined():
    """A step of the sample, as if a text had drafted its nodes beside a model."""
    steps = (part for record in replay().history.steps for part in record.requests)
    step = next(part for part in steps if part.verdict is not None and len(part.tree) > 3)
    n = len(step.tree)
    tree = dataclasses.replace(step.tree, drawn=np.full(n, Drawn.DETERMINISTIC, np.uint8), q=np.ones(n, np.float32))
    source = (np.arange(n) % len(SOURCES)).astype(np.int32)
    prob, nothing = np.where(source == 1, 0, 0.25).astype(np.float32), np.zeros(0, np.int32)
    return dataclasses.replace(
        step,
        tree=tree,
        notes=DraftNotes(prob, prob, nothing, nothing, np.zeros(0, np.float32)),
        method=MethodNotes(source=source, confidence=prob, match_length=7, match_count=2),
    )


def test_the_text_has_no_probability_of_its_own():
    step = combined()
    drawn = draw_tree(step, replay().history.vocabulary)
    for line in drawn.splitlines():
        assert ("from text" in line) == ("q=" in line and "draft p=" not in line)


def test_it_is_said_in_words():
    method = combined().method
    counts = np.bincount(method.source, minlength=3)
    assert about_method(method)[0] == f"from model {counts[0]}, text {counts[1]}, both {counts[2]}"
    assert [about_draft(method, node)[1] for node in range(3)] == ["from the model", "from the text", "from both"]
