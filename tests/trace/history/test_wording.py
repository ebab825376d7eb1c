"""One way to say a count, an acceptance and an end."""

import pytest

from specscope.trace.history.history import History
from specscope.trace.history.place import why_step
from specscope.trace.history.wording import acceptance, accepted_text, ending
from specscope.trace.record.records import FinalKind, FinishReason
from specscope.trace.record.tree import ROOT, DraftTree
from specscope.trace.words import draw_tree
from tests.trace.samples import part, record, verdict


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


def test_a_prefill_chunk_and_running_out_of_tokens_have_words_of_their_own():
    chunk = part(0, DraftTree.empty(), None, 0, prefill=1)
    assert {acceptance(chunk), accepted_text(chunk), draw_tree(chunk, History().vocabulary)} == {"prefill of 1 token"}
    assert why_step(History(), record(0, (chunk,)), chunk) == ["A prefill of 1 token: nothing was judged."]
    assert ending(FinishReason.LENGTH) == "length limit"
