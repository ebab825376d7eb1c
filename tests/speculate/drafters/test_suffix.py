"""Suffix decoding against a plain search of the text, and what its evidence says."""

import random

import pytest

from specscope import SamplingParams
from specscope.speculate.drafters.base import Context
from specscope.speculate.drafters.text import FACTOR, SuffixDrafter, Text
from tests.counting import lines_run


def text_of(tokens):
    text = Text()
    text.grow(tokens)
    return text


def context(tokens, prompt_len=None, name="r"):
    return Context(name, tokens, len(tokens) if prompt_len is None else prompt_len, SamplingParams())


def test_the_longest_match_of_equals_is_taken_and_told():
    prompt = [9, 1, 2, 3, 4, 5, 8, 1, 2, 3]
    (draft,) = SuffixDrafter(nodes=4, depth=3).propose([context(prompt)])
    assert draft.tree.token.tolist()[:2] == [4, 5]
    assert (draft.method.match_length, draft.method.match_count, draft.method.match_source) == (3, 1, "the prompt")
    assert draft.method.confidence.tolist()[0] == 1.0
    assert len(draft.tree) <= FACTOR * 3


def _worst_texts(length):
    """Texts that repeat themselves in different ways, which is when there is the most to compare."""
    draw = random.Random(1)
    block = [draw.randrange(50_000) for _ in range(400)]
    edited = [token if draw.random() > 0.03 else draw.randrange(50_000) for token in block * (length // 400 + 1)]
    return {
        "one token": [5] * length,
        "period": [i % 7 for i in range(length)],
        "two tokens": [draw.randrange(2) for _ in range(length)],
        "edits": edited[:length],
    }


@pytest.mark.parametrize("name", _worst_texts(8))
def test_a_look_into_8k_tokens_takes_well_under_a_millisecond(name):
    """0.2 to 0.5 ms: by 8,000 lines of Python at most, as in a text of 1k. One that looks at each token runs 16,000."""
    tokens, drafter = _worst_texts(8192)[name], SuffixDrafter(16, 12)
    drafter.propose([context(tokens[:-100], 10)])
    looks = (context(tokens[:length], 10) for length in range(len(tokens) - 99, len(tokens) + 1))
    work = [lines_run(drafter.propose, [one])[0] for one in looks]
    assert sorted(work)[50] < 12_000
