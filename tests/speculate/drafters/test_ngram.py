"""Prompt lookup against a plain search."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.drafters.base import Context
from specscope.speculate.drafters.ngram import NgramDrafter, occurrences, trie
from specscope.trace.params import SamplingParams
from specscope.trace.tree import ROOT

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def draft(drafter, tokens):
    return drafter.propose([Context("r", tokens, 0, SamplingParams())])[0].tree


@given(texts, st.integers(1, 4))
def test_occurrences_are_all_earlier_ones(tokens, size):
    suffix = tokens[-size:]
    plain = [i + size for i in range(len(tokens) - size) if tokens[i : i + size] == suffix]
    if len(tokens) > size:
        assert occurrences(np.array(tokens, np.int32), size).tolist() == plain


@given(texts, st.integers(1, 5))
def test_a_chain_continues_the_most_recent_match_of_the_longest_suffix(tokens, depth):
    tree = draft(NgramDrafter(depth, 1, longest=3, shortest=1), tokens)
    wanted = []
    for size in (3, 2, 1):
        ends = [i + size for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[-size:]]
        if ends and len(tokens) > size:
            wanted = tokens[ends[-1] : ends[-1] + depth]
            break
    assert tree.token.tolist() == wanted
    assert tree.parent.tolist() == list(range(-1, len(wanted) - 1))


@given(texts, st.integers(1, 4), st.integers(1, 4))
def test_a_tree_holds_the_distinct_continuations_and_no_sibling_twice(tokens, depth, width):
    drafter = NgramDrafter(depth, width, longest=2, shortest=1)
    tree = draft(drafter, tokens)
    assert len(tree) <= drafter.max_nodes
    assert tree.max_depth <= drafter.max_depth
    for node in [ROOT, *range(len(tree))]:
        children = tree.token[tree.children(node)].tolist()
        assert len(children) == len(set(children))
    text = "".join(map(str, tokens))
    for node in range(len(tree)):
        assert "".join(map(str, tree.token[tree.path_to(node)])) in text


def test_a_trie_shares_beginnings():
    tree = trie([[1, 2, 3], [1, 2, 4], [5]])
    assert tree.token.tolist() == [1, 5, 2, 3, 4]
    assert tree.parent.tolist() == [ROOT, ROOT, 0, 2, 2]
