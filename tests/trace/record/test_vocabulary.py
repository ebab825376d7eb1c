"""Bytes in and out of text, reversibly. A reduced vocabulary in a run's header: packed, read back, damage refused."""

import base64
import dataclasses
import re
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.trace.record.draft_vocabulary import (
    digest,
    draft_id,
    draft_tokens,
    lacks_draft_tokens,
    old_digest,
    pack,
    unpack,
)
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary
from specscope.trace.wire.spans import resource_attributes
from specscope.trace.wire.unspan import Decoder, run_info
from tests.trace.strategies import RUN


@given(st.sets(st.integers(0, 5000), max_size=300), st.booleans(), st.randoms())
def test_whatever_is_packed_is_read_back(tokens, shuffled, chance):
    order = sorted(tokens)
    if shuffled:
        chance.shuffle(order)
    assert unpack(pack(order), len(order)).tolist() == order


def test_draft_ids():
    run = dataclasses.replace(RUN, draft_vocab=3, draft_tokens=pack([7, 9, 30]))
    assert (run_info(resource_attributes(run)), draft_tokens(run).tolist()) == (run, [7, 9, 30])
    assert [draft_id(run, token) for token in (9, 30, 8)] == [1, 2, None]
    whole = dataclasses.replace(RUN, draft_tokens="")
    assert draft_tokens(whole) is None
    assert draft_id(whole, 8) == 8


def packed(data, kind="set", level=6):
    return f"{kind}:" + base64.b64encode(zlib.compress(data, level)).decode()


def test_a_digest_is_of_the_tokens_and_not_of_what_compressed_them():
    known = list(range(0, 3000, 7))
    bits = np.zeros(known[-1] + 1, np.bool_)
    bits[known] = True
    ways = [packed(np.packbits(bits, bitorder="little").tobytes(), level=level) for level in (0, 1, 9)]
    ways += [packed(np.array(known, "<i4").tobytes(), "map"), pack(known)]
    assert len(set(ways)) > 2
    assert len({digest(way) for way in ways}) == 1
    assert digest(digest(ways[0])) == digest(ways[0]) != digest(pack(known[::-1]))
    assert digest("") == old_digest("") == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("heap:xx", "neither a set nor a map"),
        ("set:###", "not valid zlib data"),
        ("set:" + base64.b64encode(b"abc").decode(), "not valid zlib data"),
        (pack([1, 2, 3])[:-8], "as it should be|cut short"),
        (packed(bytes(2**25)), "cut short or too long"),
        (packed(b"\x01"), "holds 1 tokens, not 3"),
        (packed(b"\x01\x00", "map"), "cut short or too long"),
        (packed(np.array([1, 1, 2], "<i4").tobytes(), "map"), "names a token twice"),
        (packed(np.array([1, -1, 2], "<i4").tobytes(), "map"), "one outside the vocabulary"),
    ],
)
def test_of_a_damaged_one_nothing_else_is_lost(text, says):
    run, decoder = dataclasses.replace(RUN, draft_vocab=3, draft_tokens=text), Decoder()
    read = run_info(resource_attributes(run))
    assert dataclasses.replace(read, draft_tokens="") == dataclasses.replace(run, draft_tokens="")
    decoder.run = read
    decoder.learn_vocabulary(text)
    assert lacks_draft_tokens(decoder.run)
    [line] = decoder.faults.lines()
    assert re.search(f"`specscope.run.draft_tokens` .*(?:{says})", line)


@given(st.text(max_size=30), st.lists(st.integers(1, 4), min_size=60, max_size=60))
def test_text_cut_into_tokens_anywhere_comes_back_whole(text, sizes):
    data = text.encode("utf-8", "replace")
    pieces: list[bytes] = []
    for size in sizes:
        if data:
            pieces.append(data[:size])
            data = data[size:]
    pieces.append(data)
    vocabulary = Vocabulary(dict(enumerate(pieces)))
    detokenizer = Detokenizer(vocabulary)
    out = "".join(detokenizer.feed([token]) for token in range(len(pieces))) + detokenizer.flush()
    assert out == text.encode("utf-8", "replace").decode()
    assert vocabulary.text(range(len(pieces))) == out


def test_special_and_unknown_tokens():
    vocabulary = Vocabulary({0: b"<end>", 1: b"a b", 2: b"", 3: b"\xf0\x9f", 4: b"\n\x07"}, {0})
    assert vocabulary.text([1, 0, 2, 9]) == "a b"
    assert [vocabulary.show(t) for t in (0, 1, 2, 3, 4, 9)] == ["<end>", "a␣b", "∅", "\\xf0\\x9f", "⏎\\x07", "#9"]
