"""One request: what the client says of it is what a server did."""

import asyncio
import json
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.bench.datasets import LoadRequest
from specscope.bench.endpoint import STREAM_OPTIONS, RequestOptions
from specscope.bench.endpoint import Endpoint as Client
from tests.bench.server import Piece, Reply, Server
from tests.waiting import HANG_SECONDS


def send(server, *, options=0, ask=None, **request):
    """One answer of a server."""

    async def go():
        async with Client(getattr(server, "url", server), RequestOptions(**request)) as client:
            client.model, client._options = "tiny", STREAM_OPTIONS[options]
            return await client.send(ask or LoadRequest("hello"), 0)

    return asyncio.run(go())


@pytest.mark.parametrize("chat", [True, False])
def test_times_are_those_of_the_server(chat):
    pieces = [Piece("a", 1, 0.05), Piece("b c", 2, 0.03), Piece("d", 1, 0.04)]
    with Server(lambda number, body: Reply(pieces)) as server:
        answer = send(server, chat=chat)
    assert answer.error == ""
    assert answer.whole
    assert len(answer.chunks) == len(server.wrote) == 3
    for came, wrote in zip(answer.chunks, server.wrote, strict=True):
        assert wrote <= came <= wrote + HANG_SECONDS
    assert answer.sent <= server.times[0]
    assert answer.ended >= answer.chunks[-1]
    # sleeping takes as long as was asked or longer
    assert answer.ttft == answer.chunks[0] - answer.sent >= 0.05
    assert answer.gaps == [answer.chunks[1] - answer.chunks[0], answer.chunks[2] - answer.chunks[1]]
    assert answer.latency >= 0.12
    assert (answer.input_tokens, answer.output_tokens) == (7, 4)
    assert answer.tpot == pytest.approx((answer.latency - answer.ttft) / 3)
    first, second = answer.gaps
    assert answer.counts == [1, 3, 4]
    assert answer.token_gaps == [first / 2, first / 2, second]


def test_the_role_that_opens_a_chat_is_no_token():
    with Server(lambda number, body: Reply([Piece("a", 1, 0.08)])) as server:
        answer = send(server)
    assert answer.ttft >= 0.08
    assert len(answer.chunks) == 1
    assert answer.tpot is None


def test_tokens_without_text_count():
    with Server(lambda number, body: Reply([Piece("a"), Piece("", 2), Piece("b")])) as server:
        counted, told_late = send(server), send(server, options=1)
    assert counted.counts == [1, 3, 4]
    assert len(told_late.chunks) == 2
    assert told_late.output_tokens == 4
    assert told_late.token_gaps == []


def test_a_server_that_counts_nothing():
    with Server(lambda number, body: Reply([Piece("a b", 2), Piece("c")])) as server:
        answer = send(server, options=2)
    assert "stream_options" not in server.bodies[0]
    assert (answer.error, answer.input_tokens, answer.told_tokens, answer.output_tokens) == ("", None, None, 2)


def test_an_answer_of_nothing_but_an_end_is_an_answer():
    with Server(lambda number, body: Reply([])) as server:
        answer = send(server)
    assert answer.error == ""
    assert answer.chunks == [answer.ended]
    assert answer.output_tokens == 0


TELLS = {"acceptance_histogram": [2, 1, 3], "num_draft_tokens": 12, "per_step_accepted": [0, 2, 2, 1, 0, 2]}
TELLS |= {"per_step_drafted": [2, 2, 2, 2, 2, 2], "num_spec_steps": 6, "mean_acceptance_length": 2.1667}


def test_acceptance_comes_from_the_response():
    last = {"metrics": {"time_to_first_token_ms": 3.0, "speculative_decoding": TELLS}}
    with Server(lambda number, body: Reply(last=last)) as server:
        drafts = send(server).drafts
    assert (drafts.drafts, drafts.drafted, drafts.accepted, drafts.accepted_at) == (6, 12, 7, (4, 3))
    for useless in ({"metrics": None}, {"metrics": {"speculative_decoding": None}}, {"metrics": {"spec_x": []}}):
        with Server(lambda number, body, useless=useless: Reply(last=useless)) as server:
            answer = send(server)
        assert (answer.error, answer.drafts) == ("", None)


def test_cached_tokens_are_told():
    async def go():
        async with Client(server.url, RequestOptions()) as client:
            return [await client.send(LoadRequest("x"), number) for number in range(2)]

    details = {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}}
    with Server(lambda number, body: Reply(last=details)) as server:
        assert [answer.cached_tokens for answer in asyncio.run(go())] == [8, 8]


FAILURES = {
    "refused": (Reply(status=429, body={"error": {"message": "slow down", "code": 429}}), "HTTP 429: slow down"),
    "a plain refusal": (Reply(status=401, body={"error": "Unauthorized"}), "HTTP 401: Unauthorized"),
    "FastAPI's": (Reply(status=404, body={"detail": "Not Found"}), "HTTP 404: Not Found"),
    "text": (Reply(status=502, body="Bad\n  Gateway \x1b[2J"), "HTTP 502: Bad Gateway"),
    "no text": (Reply(status=500, body=""), "HTTP 500: X"),
    "a redirect": (Reply(status=307, body=""), "HTTP 307: X"),
    "an error later": (
        Reply([Piece("a"), Piece(raw=json.dumps({"error": {"message": "out of blocks"}}))]),
        "error in the stream: out of blocks",
    ),
    "no chunk": (Reply([Piece("a"), Piece(raw="{broken")]), "a chunk of the stream is no completion"),
    "of another kind": (Reply([Piece(raw='{"choices": "no"}')]), "a chunk of the stream is no completion"),
    "no stream": (Reply(body={"choices": []}), "Expected response with content type 'text/event-stream', got"),
    "aborted": (Reply(finish="abort"), "the server ended it: abort"),
    "no end": (Reply(finish=None, done=False), "the stream ended before the answer did"),
    "nothing": (Reply([], finish=None, done=False), "the stream ended before the answer did"),
    "cut": (Reply([Piece("a")], cut=True), "the connection broke in the middle of the stream ("),
    "cut at once": (Reply([], cut=True), "the connection broke before the answer ("),
}


@pytest.mark.parametrize("name", FAILURES)
def test_every_failure_has_its_reason(name):
    reply, says = FAILURES[name]
    with Server(lambda number, body: reply) as server:
        answer = send(server)
    assert answer.error.startswith(says), answer.error
    assert answer.error.isprintable()


@pytest.mark.parametrize("reply", [Reply(finish=None), Reply(done=False)], ids=["[DONE]", "finish_reason"])
def test_either_mark_of_the_end_is_enough(reply):
    with Server(lambda number, body: reply) as server:
        assert send(server).error == ""


def test_an_end_of_nothing_is_none():
    with Server(lambda number, body: Reply([], finish=None)) as server:
        answer = send(server, chat=False)
    assert answer.input_tokens == 7  # there was a last chunk, and [DONE]
    assert answer.error == "the stream ended before the answer did"


def test_a_server_that_never_answers_is_given_up():
    with Server(lambda number, body: Reply(silent=True)) as server:
        start = time.perf_counter()
        answer = send(server, timeout=0.2)
    assert answer.error == "no answer after 0.2 s"
    assert 0.2 <= time.perf_counter() - start < HANG_SECONDS


def test_one_that_stops_in_the_middle_too():
    with Server(lambda number, body: Reply([Piece("a"), Piece("b", 1, 3600)])) as server:
        assert send(server, timeout=1.5).error == "not at its end after 1.5 s"


def test_nobody_there():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        answer = send(f"http://127.0.0.1:{held.getsockname()[1]}")
    assert answer.error.startswith("cannot connect: ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "usage", "error", "metrics", "content"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
EVENTS = st.text(max_size=20) | VALUES.map(json.dumps) | st.just('{"metrics": {"speculative_decoding": 3}}')


def test_no_stream_crashes_it():
    with Server() as server:

        @settings(max_examples=60, deadline=None)
        @given(st.lists(EVENTS, max_size=4))
        def any_stream(events):
            server.reply = lambda number, body: Reply([Piece(raw=event) for event in events])
            answer = send(server)
            assert answer.whole or answer.error
            assert "\n" not in answer.error

        any_stream()
