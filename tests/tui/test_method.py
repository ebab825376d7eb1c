"""What a drafter's method tells, and a lossy rule, where they are shown; nothing where they are not told."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specscope.analyze.report import build_report
from specscope.analyze.verify.trial import judge
from specscope.debug.viewer import Viewer
from specscope.trace.history.history import History
from specscope.trace.history.wording import about_draft, about_method
from specscope.trace.record.notes import SOURCES, MethodNotes
from specscope.trace.record.records import DraftNotes
from specscope.trace.record.tree import Drawn
from specscope.trace.words import draw_tree
from specscope.tui.look import Look
from specscope.tui.widgets.node_view import node_facts
from specscope.tui.widgets.tree import TreePanel

from .sample import replay, told

WIDTH = 160


def noted(part):
    """The same step as a block drafter under a lossy rule would have it."""
    if part.verdict is None or not len(part.tree):
        return part
    n = len(part.tree)
    rows = {"confidence": np.linspace(0.9, 0.5, n).astype(np.float32), "module": np.arange(n, dtype=np.int32)}
    match = {"match_length": 5, "match_count": 3, "match_source": "the prompt"}
    method = MethodNotes(**rows, **match, one_pass=True, unverified=2)
    return dataclasses.replace(part, verdict=dataclasses.replace(part.verdict, rule="lossy:fly"), method=method)


@pytest.fixture(scope="module")
def histories():
    """(As our own engine made it, with notes of a method and a lossy rule)."""
    plain = replay().history
    other = History(run=plain.run, vocabulary=plain.vocabulary)
    for record in plain.steps:
        other.append(dataclasses.replace(record, requests=tuple(map(noted, record.requests))))
    return plain, other


def look_at(history):
    """At the last step with a tree."""
    viewer = Viewer(history)
    at, part = next(
        (at, part)
        for at in range(len(history.steps) - 1, -1, -1)
        for part in history.steps[at].requests
        if part.verdict is not None and len(part.tree) > 1
    )
    viewer.position = at
    return Look(viewer, part.request), part


def shown(history):
    look, part = look_at(history)
    tree = told(TreePanel().draw(look, WIDTH, 40).lines)
    return tree, told(node_facts(look, part, part.verdict, 1, WIDTH, 60))


def test_the_tree_and_the_node_tell_it_and_nothing_of_what_is_not_told(histories):
    for said in shown(histories[0]):
        for word in ("lossless", "one pass", "not verified", "match of", "chance of", "module"):
            assert word not in said
    tree, node = shown(histories[1])
    assert "lossy:fly: not lossless" in tree
    assert "all depths in one pass · 2 drafts not verified · a match of 5 tokens, 3 times, in the prompt" in tree
    _, part = look_at(histories[1])
    assert f"confidence {float(part.method.confidence[1]):.3f}, module 1" in node
    assert "lossy:fly: not lossless" in node


def test_report_and_verify_tell_what_is_not_lossless(histories):
    plain, other = (build_report(history, source="x") for history in histories)
    parts = [part for step in histories[1].steps for part in step.requests if part.verdict is not None]
    lossy = [part for part in parts if part.method is not None]
    assert any(
        line.startswith(f"{len(lossy)} of {len(parts)} verdicts under a rule that is not lossless (lossy:fly)")
        for line in other.warnings
    )
    assert f"{2 * len(lossy)} drafts not verified" in "\n".join(other.warnings)
    assert not any("lossless" in line or "not verified" in line for line in plain.warnings)
    plain, other = (judge(history, source="x") for history in histories)
    assert "a lossy rule's output does not follow the target's p: it is not judged" in other.notes
    assert not any("lossy" in line for line in plain.notes)
    assert {check.name: check.tested for check in other.checks}["accept probability"] == 0


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


def test_the_text_has_no_probability_of_its_own_and_the_sources_are_said_in_words():
    step = combined()
    drawn = draw_tree(step, replay().history.vocabulary)
    for line in drawn.splitlines():
        assert ("from text" in line) == ("q=" in line and "draft p=" not in line)
    method = step.method
    counts = np.bincount(method.source, minlength=3)
    assert about_method(method)[0] == f"from model {counts[0]}, text {counts[1]}, both {counts[2]}"
    assert [about_draft(method, node)[1] for node in range(3)] == ["from the model", "from the text", "from both"]
