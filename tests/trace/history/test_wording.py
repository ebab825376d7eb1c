"""One way to say a count, an acceptance and an end."""

from __future__ import annotations

import dataclasses

import pytest

from specscope.trace.history.draw import draw_tree
from specscope.trace.history.history import History
from specscope.trace.history.wording import about_sizing, acceptance, accepted_text, ending, plural
from specscope.trace.record.records import FinalKind, FinishReason
from specscope.trace.record.tree import ROOT, DraftTree
from tests.trace.samples import part, verdict
from tests.tui.sample import replay


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests"), (12_345, "12,345 requests")]
)
def test_counts(count, text):
    assert plural(count, "request") == text
    assert plural(count, "entry", "entries").endswith(" entry" if count == 1 else " entries")


def tree_step():
    """A step of r1, whose tree has more nodes than it is deep."""
    steps = replay().history.requests["r1"].steps
    return next(step for step in steps if step.verdict is not None and len(step.tree) > step.tree.max_depth)


def test_what_the_text_had_was_verified_though_the_head_s_draft_would_not_pay():
    """Issue 43: such a step said that no draft pays, and judged two nodes."""
    figures = ": a pass must bring 0.16 tokens and 4 nodes 2.61; it would bring 0.22"
    for drafter, model in (("suffix+eagle", "head"), ("ngram+draft_model", "draft model")):
        for told in ("no draft pays", f"the {model}'s draft would not pay"):
            step = dataclasses.replace(tree_step(), drafter=drafter, sizing=told + figures)
            verified = f"the {model}'s draft would not pay, and the text's was verified{figures}"
            assert about_sizing(step) == verified
            assert about_sizing(dataclasses.replace(step, tree=DraftTree.empty())) == told + figures
    probe = dataclasses.replace(tree_step(), drafter="suffix+eagle", sizing="a probe after 3 steps without drafts")
    assert about_sizing(probe) == probe.sizing
    assert about_sizing(dataclasses.replace(tree_step(), sizing="")) == ""


@pytest.mark.parametrize(
    ("parents", "path", "words"),
    [
        ([ROOT, ROOT, ROOT, ROOT], [], "0 of 4 nodes, depth 0 of 1"),
        ([ROOT, ROOT, 0, 0], [0, 3], "2 of 4 nodes, depth 2 of 2"),
        ([ROOT], [0], "1 of 1 node, depth 1 of 1"),
        ([], [], "nothing drafted"),
    ],
)
def test_what_was_accepted_is_said_of_nodes_and_of_depth(parents, path, words):
    tree = DraftTree.build(list(range(len(parents))), parents)
    outcome = [1 if node in path else 2 for node in range(len(parents))]
    step = part(3, tree, verdict(tree, outcome, path, 9, FinalKind.RECOVERED), len(path) + 1)
    assert acceptance(step) == words
    assert accepted_text(step) == (f"accepted {words}" if parents else words)
    assert acceptance(step, short=True) == words.replace(" of ", "/")


def test_a_prefill_chunk_says_so():
    chunk = part(0, DraftTree.empty(), None, 0, prefill=1)
    assert {acceptance(chunk), accepted_text(chunk), draw_tree(chunk, History().vocabulary)} == {"prefill of 1 token"}


def test_running_out_of_tokens_is_not_called_length():
    assert ending(FinishReason.LENGTH) == "length limit"
    assert ending(FinishReason.EOS) == "eos"
