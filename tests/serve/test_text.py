"""A stream's text is that of the whole output, however its tokens came, and whatever min_tokens let pass."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specscope.serve.calls import TextStream
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo
from specscope.trace.record.vocabulary import Vocabulary

PIECES = [b"a", b"b", b"ab", b" ", b"aba", b"\xc3", b"\xa4", "é".encode(), b"restaurant"]
VOCABULARY = Vocabulary(dict(enumerate(PIECES)))
INFO = RequestInfo("r", 0, 0, "", np.zeros(0, np.int32), SamplingParams(min_tokens=1))


def ended(tokens, stop):
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    return RequestEnd(INFO, 0, reason, stop, np.array(tokens, np.int32)).text(tokens, VOCABULARY)


@given(
    st.lists(st.lists(st.integers(0, len(PIECES) - 1), max_size=4), min_size=1, max_size=6),
    st.sampled_from(["", "a", "ab", "b a", "é"]),
)
def test_pieces_are_the_whole(steps, stop):
    tokens = [token for step in steps for token in step]
    last = VOCABULARY.text(tokens)
    before = VOCABULARY.text(tokens[:-1])
    if stop and last.find(stop, max(len(before) - len(stop) + 1, 0)) < 0:
        stop = ""  # the last token completes none: the engine would not have ended there
    stream = TextStream(VOCABULARY, (stop,) if stop else ())
    got = "".join(stream.feed(step) for step in steps[:-1]) + stream.end(steps[-1], stop)
    if steps[-1]:
        assert got == ended(tokens, stop)


def test_the_last_token_ends_the_text_at_its_first_stop_string():
    """Seen in a soak: a token with the stop string in it twice, behind others that min_tokens had let pass."""
    tokens = [0, 3, 8]
    assert VOCABULARY.text(tokens) == "a restaurant"
    assert ended(tokens, "a") == "a rest"
    stream = TextStream(VOCABULARY, ("a",))
    assert stream.feed(tokens[:1]) + stream.end(tokens[1:], "a") == "a rest"
