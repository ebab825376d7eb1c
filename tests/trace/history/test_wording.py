"""One way to say a count, an acceptance and an end."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from specscope.debug import show
from specscope.debug.session import Session
from specscope.trace.history.draw import draw_tree
from specscope.trace.history.history import History
from specscope.trace.history.wording import about_sizing, acceptance, accepted_text, ending, plural
from specscope.trace.record.records import FinalKind, FinishReason
from specscope.trace.record.tree import ROOT, DraftTree
from specscope.trace.wire.reading import CaptureReader
from tests.trace.samples import part, verdict
from tests.tui.sample import replay


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests"), (12_345, "12,345 requests")]
)
def test_counts(count, text):
    assert plural(count, "request") == text


def test_nouns_of_their_own():
    assert plural(1, "entry", "entries") == "1 entry"
    assert plural(3, "entry", "entries") == "3 entries"


def tree_step():
    """A step of r1, whose tree has more nodes than it is deep."""
    steps = replay().history.requests["r1"].steps
    return next(step for step in steps if step.verdict is not None and len(step.tree) > step.tree.max_depth)


def test_acceptance_is_of_the_nodes_and_of_the_depth():
    step = tree_step()
    assert step.verdict is not None
    got, nodes, depth = step.verdict.accepted, len(step.tree), step.tree.max_depth
    assert acceptance(step) == f"{got} of {nodes} nodes, depth {got} of {depth}"
    assert acceptance(step, short=True) == f"{got}/{nodes} nodes, depth {got}/{depth}"


def test_a_single_node_is_no_nodes():
    step = tree_step()
    assert step.verdict is not None
    none = dataclasses.replace(step.verdict, path=step.verdict.path[:0])
    one = dataclasses.replace(step, tree=DraftTree.build([5], [-1]), verdict=none)
    assert acceptance(one) == "0 of 1 node, depth 0 of 1"


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


def test_steps_that_judged_nothing():
    step = tree_step()
    assert acceptance(dataclasses.replace(step, tree=DraftTree.empty())) == "nothing drafted"
    assert acceptance(dataclasses.replace(step, verdict=None, prefill_tokens=1)) == "prefill of 1 token"


def test_the_console_says_it_in_the_same_words():
    history = replay().history
    session = Session(history=history)
    session.position = next(at for at, record in enumerate(history.steps) if len(record.requests[1].tree) > 4)
    session.request = "r1"
    part = session.part
    assert part is not None
    assert acceptance(part) in show.where(session)


def test_one_token_of_prefill_is_not_tokens():
    step = dataclasses.replace(tree_step(), verdict=None, prefill_tokens=1)
    assert draw_tree(step, History().vocabulary) == "prefill of 1 token"


def test_running_out_of_tokens_is_not_called_length():
    assert ending(FinishReason.LENGTH) == "length limit"
    assert ending(FinishReason.EOS) == "eos"


def test_the_console_tells_p_as_tried_and_p_before_where_it_is_another_number():
    reader = CaptureReader(Path(__file__).parents[3] / "traces" / "sampled.jsonl")
    while reader.read(1):
        pass
    session = Session(history=reader.history)
    session.position = reader.history.requests["r1"].engine_steps[4]
    session.request = "r1"
    session.node = 0
    first = show.where(session)
    assert "a = min(1, p / q) = min(1, 0.07323 / 0.6278) = 0.1167" in first
    assert "before its earlier siblings" not in first
    session.node = 1
    assert re.search(r"min\(1, 0.0252 / 0.201\) = \d\.\d+; p was 0\.\d+ before its earlier", show.where(session))


@pytest.mark.parametrize(
    ("parents", "path", "words"),
    [
        ([ROOT, ROOT, ROOT, ROOT], [], "accepted 0 of 4 nodes, depth 0 of 1"),
        ([ROOT, ROOT, 0, 0], [0, 3], "accepted 2 of 4 nodes, depth 2 of 2"),
        ([ROOT], [0], "accepted 1 of 1 node, depth 1 of 1"),
        ([], [], "nothing drafted"),
    ],
)
def test_what_was_accepted_is_said_of_nodes_and_of_depth(parents, path, words):
    tree = DraftTree.build(list(range(len(parents))), parents)
    outcome = [1 if node in path else 2 for node in range(len(parents))]
    step = part(3, tree, verdict(tree, outcome, path, 9, FinalKind.RECOVERED), len(path) + 1)
    assert accepted_text(step) == words


def test_a_prefill_chunk_says_so():
    assert accepted_text(part(0, DraftTree.empty(), None, 0, prefill=1)) == "prefill of 1 token"
