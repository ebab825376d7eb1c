"""One way to say a count and what was accepted."""

import pytest

from specscope.trace.records import FinalKind
from specscope.trace.tree import ROOT, DraftTree
from specscope.trace.wording import accepted_text, plural
from tests.trace.samples import part, verdict


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests"), (1000, "1,000 requests")]
)
def test_a_count_has_its_plural(count, words):
    assert plural(count, "request") == words


def test_an_irregular_plural_is_given():
    assert [plural(n, "branch", "branches") for n in (1, 2)] == ["1 branch", "2 branches"]


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
