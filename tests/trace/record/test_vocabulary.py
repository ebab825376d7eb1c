"""Bytes in and out of text, reversibly."""

from hypothesis import given
from hypothesis import strategies as st

from specscope.trace.record.vocabulary import Detokenizer, Vocabulary, escape, unescape


@given(st.binary(max_size=40))
def test_escape_is_reversible_and_valid_unicode(piece):
    assert unescape(escape(piece)) == piece
    escape(piece).encode("utf-8")


@given(st.text(max_size=20).filter(lambda t: "\\" not in t and t.isascii()))
def test_plain_text_stays_readable(text):
    assert escape(text.encode()) == text


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
