"""What /v1/completions and /v1/chat/completions answer, beside what the engine generates by itself."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope import Engine, SamplingParams
from specscope.serve.calls import TextStream
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.spans import SERVER, Encoder, SpanLevel


@pytest.fixture(scope="module")
def twin(tiny):
    """An engine like the server's, that nobody serves: sampled tokens hang on the drafts."""
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "3"}
    return Engine(target=str(tiny), dtype="float32", kv_memory=0.01, max_batch=3, threads=1, **how)


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_what_the_engine_generates(server, twin):
    (expected,) = twin.generate("abcabcab", SamplingParams(max_tokens=8))
    answer = server.complete().json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 16, "completion_tokens": 8}
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")


def test_template_variables_of_a_chat_are_used_and_recorded(server):
    infos = []
    records = server.engine.bus.subscribe(lambda record: infos.extend(record.admitted))
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert server.chat(**more).status_code == 200
    records.flush()
    refused = server.chat(chat_template_kwargs={"tokenize": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert [info.prompt.endswith("<|-|>") for info in infos] == [False, True]
    assert [info.labels for info in infos] == [{}, {"chat_template_kwargs": '{"enable_thinking": false}'}]


def test_the_span_of_a_request_says_that_it_was_served_and_what_was_asked(server):
    ends = []
    records = server.engine.bus.subscribe(ends.append)
    assert (server.chat().status_code, server.complete().status_code) == (200, 200)
    records.flush()
    encoder = Encoder(server.engine.run_info, server.engine.vocabulary, SpanLevel.REQUESTS)
    roots = [span for record in ends for span in encoder.encode(record)]
    assert [span.name.partition(" ")[0] for span in roots] == ["chat", "text_completion"]
    assert {span.kind for span in roots} == {SERVER}
    assert all(span.attributes["gen_ai.latency.time_to_first_token"] > 0 for span in roots)


def test_token_ids_texts_and_n(server, twin):
    ids = twin.encode("abcabcab")[1]
    one = server.complete().json()["choices"][0]["text"]
    assert server.complete(ids).json()["choices"][0]["text"] == one
    several = server.complete(["abcabcab", "x"], n=2, temperature=0.8, seed=3).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 9
    for index, choice in enumerate(several["choices"]):
        expected = twin.generate(
            ["abcabcab", "x"][index // 2], SamplingParams(max_tokens=8, temperature=0.8, seed=3 + index)
        )
        assert choice["text"] == expected[0].text


def test_a_stream_says_the_same(server):
    whole = server.complete(max_tokens=24).json()
    told = events(server.complete(max_tokens=24, stream=True, stream_options={"include_usage": True}))
    *pieces, last = told
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "length"
    assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces[:-1])
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert len(pieces) < 24, "a step's tokens come together"


def test_a_chat_and_its_stream_say_the_same(server, twin):
    whole = server.chat(max_completion_tokens=10).json()
    (expected,) = twin.generate([{"role": "user", "content": "hello hello"}], SamplingParams(max_tokens=10))
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    told = events(server.chat(max_completion_tokens=10, stream=True, n=2))
    assert [one["choices"][0]["delta"] for one in told[:2]] == [{"role": "assistant", "content": ""}] * 2
    for index in range(2):
        texts = [c["delta"].get("content", "") for one in told for c in one["choices"] if c["index"] == index]
        assert "".join(texts) == expected.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_no_part_of_a_stop_string_is_shown(server, stream, keep):
    text = server.complete(max_tokens=40).json()["choices"][0]["text"]
    at = next(i for i in range(4, len(text) - 3) if "�" not in text[i : i + 3] and text.index(text[i : i + 3]) == i)
    stop = text[at : at + 3]
    answer = server.complete(max_tokens=40, stop=stop, stream=stream, include_stop_str_in_output=keep)
    pieces = [one["choices"][0] for one in (events(answer) if stream else [answer.json()])]
    assert "".join(one["text"] for one in pieces) == text[: at + (3 if keep else 0)]
    assert (pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]) == ("stop", stop)


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
