"""Prompt lookup and suffix decoding against plain searches of the text."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.speculate.drafters.base import Context
from specscope.speculate.drafters.text import FACTOR, NgramDrafter, SuffixDrafter, distinct, trie
from specscope.trace.record.params import SamplingParams
from tests.counting import lines_run


def occurrences(tokens, size):
    """Ends (index past the last token), ascending, of earlier occurrences of the last `size` tokens."""
    suffix = tokens[-size:]
    candidates = np.flatnonzero(tokens[size - 1 : -1] == suffix[-1]) + size
    for back in range(2, size + 1):
        candidates = candidates[tokens[candidates - back] == suffix[-back]]
    return candidates


def searched(drafter, tokens):
    """The tree by a search through the whole text: what the drafter's index must give."""
    tokens = np.asarray(tokens, np.int32)
    for size in range(min(drafter.longest, len(tokens) - 1), drafter.shortest - 1, -1):
        ends = occurrences(tokens, size)
        if len(ends):
            return trie(distinct([tokens[end : end + drafter.depth].tolist() for end in ends[::-1]], drafter.width))
    return trie([])


edits = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),  # committed
    st.floats(0, 1),  # gone back, to so much of it
    st.just("release"),
    st.just("twice"),
)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), edits), max_size=30),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(max_examples=120)
def test_the_index_gives_what_a_search_gives_whatever_becomes_of_the_text(steps, depth, width, shortest, more):
    drafter = NgramDrafter(depth, width, longest=shortest + more, shortest=shortest)
    texts = {"a": [1, 0, 1], "b": [2]}
    for name, edit in steps:
        tokens = texts[name]
        if isinstance(edit, list):
            tokens += edit
        elif isinstance(edit, float):
            del tokens[1 + int(edit * (len(tokens) - 1)) :]
            drafter.rewind(name, len(tokens))
        elif edit == "release":
            drafter.release(name)
        context = Context(name, tokens, 1, SamplingParams())
        wanted = searched(drafter, tokens)
        tree = drafter.propose([context])[0].tree
        assert tree.token.tolist() == wanted.token.tolist()
        assert tree.parent.tolist() == wanted.parent.tolist()


def test_a_look_costs_the_same_however_long_the_text_is():
    """Counted, not timed: the ends that were examined after a thousand and after eight thousand repetitions."""
    looked = []
    for count in (1000, 8000):
        drafter = NgramDrafter(5, 3)
        tokens = [1, 2, 3] * count
        drafter.propose([Context("r", tokens, 0, SamplingParams())])
        index = drafter._indices["r"]
        tokens.append(1)
        index.grow(tokens)
        looked.append(len(list(index.ends(4))))
        assert index._next == len(tokens) - 4
    assert looked[0] == looked[1] <= 3 + 4


def context(tokens, prompt_len=None, name="r"):
    return Context(name, tokens, len(tokens) if prompt_len is None else prompt_len, SamplingParams())


def test_the_longest_match_of_equals_is_taken_and_told():
    prompt = [9, 1, 2, 3, 4, 5, 8, 1, 2, 3]
    (draft,) = SuffixDrafter(nodes=4, depth=3).propose([context(prompt)])
    assert draft.tree.token.tolist()[:2] == [4, 5]
    assert (draft.method.match_length, draft.method.match_count, draft.method.match_source) == (3, 1, "the prompt")
    assert draft.method.confidence.tolist()[0] == 1.0
    assert len(draft.tree) <= FACTOR * 3


def test_a_look_into_8k_tokens_takes_well_under_a_millisecond():
    """0.2 to 0.5 ms: by 8,000 lines of Python at most, as in a text of 1k. One that looks at each token runs 16,000.

    In texts that repeat themselves, which is when there is the most to compare.
    """
    draw = random.Random(1)
    block = [draw.randrange(50_000) for _ in range(400)] * 21
    edited = [token if draw.random() > 0.03 else draw.randrange(50_000) for token in block]
    for text in ([5] * 8192, [i % 7 for i in range(8192)], [draw.randrange(2) for _ in range(8192)], edited[:8192]):
        drafter = SuffixDrafter(16, 12)
        drafter.propose([context(text[:-100], 10)])
        looks = (context(text[:length], 10) for length in range(len(text) - 99, len(text) + 1))
        work = [lines_run(drafter.propose, [one])[0] for one in looks]
        assert sorted(work)[50] < 12_000
