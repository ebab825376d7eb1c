"""What completions answer, beside what the engine generates by itself; and what leaves the process without text."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope import SamplingParams
from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands
from specscope.remote.receiver import Receiver
from specscope.serve.calls import TextStream
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SERVER, Encoder, SpanLevel
from tests.engines import fresh, pressed, tiny_engine
from tests.searching import of_file, rows, tells
from tests.serve.running import running
from tests.support.records import received

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(scope="module")
def twin(tiny):
    """An engine like the server's, that nobody serves: sampled tokens hang on the drafts."""
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "3"}
    return tiny_engine(tiny, max_batch=3, threads=1, **how)


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


def test_choices_of_requests_without_a_seed_are_samples_of_their_own(server):
    texts = [choice["text"] for _ in range(2) for choice in server.complete(n=3, temperature=1).json()["choices"]]
    assert len(set(texts)) == 6


def test_a_stream_says_the_same(server):
    whole = server.complete(max_tokens=24).json()
    told = events(server.complete(max_tokens=24, stream=True, stream_options={"include_usage": True}))
    *pieces, last = told
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "length"
    assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces[:-1])
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len(pieces) < 24, "a step's tokens come together"


def test_a_stream_says_as_the_whole_does_where_each_token_with_logprobs_is_in_its_choice(server):
    how = {"max_tokens": 24, "temperature": 1, "seed": 1, "logprobs": 0, "n": 2}
    streamed = [choice for told in events(server.complete(**how, stream=True)) for choice in told["choices"]]
    for choice in server.complete(**how).json()["choices"]:
        pieces = [piece["logprobs"] for piece in streamed if piece["index"] == choice["index"]]
        offsets, text = choice["logprobs"]["text_offset"], choice["text"]
        assert [offset for piece in pieces for offset in piece["text_offset"]] == offsets
        texts = [text[begin:end] for begin, end in zip(offsets, [*offsets[1:], len(text)], strict=True)]
        assert "".join(texts) == text
        tokens = [token for token in zip(choice["logprobs"]["tokens"], texts, strict=True) if "�" not in token[0]]
        assert len(tokens) > 5
        assert all(found.lstrip("�") == own.replace("<unk>", "") for own, found in tokens), "broken characters before"


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


def test_a_chat_may_grow_to_what_the_kv_cache_holds_and_an_error_that_is_of_no_field_names_none(twin):
    blocks = twin.runner.cache.pool.blocks
    pressed(twin, 6)
    with running(twin) as server:
        chat = server.chat(max_tokens=None, ignore_eos=True).json()
        error = server.complete(max_tokens=500).json()["error"]
    fresh(twin, blocks)
    assert (chat["choices"][0]["finish_reason"], chat["usage"]["total_tokens"]) == ("length", 6 * 16 + 1 - 3)
    assert (error["message"].partition(":")[0], error["param"]) == ("the request does not fit", None)


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


PROMPT = "quokkas"  # the tiny model has a token for each of its bytes
STOP, LABEL = "wombat", "numbat"
ASKED = {"ignore_eos": True, "stop": [STOP], "logit_bias": {"251": 0.5}, "stop_token_ids": [250], "logprobs": 2}
CALLER = {"traceparent": f"00-{1:032x}-{1:016x}-01", "tracestate": f"a={LABEL}"}
LOOKS = ("info requests", "tree", "why", "node 0", "info drafter", "check kv", "fork seed=2")


def asked(client, lines):
    """What a debugger prints, refusals among it."""
    for line in lines:
        try:
            yield client.run(line)
        except UserError as error:
            yield str(error)


@pytest.mark.every(2)
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("level", Privacy, ids=lambda level: level.name.lower())
def test_it_leaves_by_no_way(served_engine, tmp_path, level, protocol):
    file, socket, taken, records = tmp_path / "a.jsonl", tmp_path / "s", [], []
    served_engine.bus.subscribe(records.append, lossless=True)
    with Receiver(taken.append) as receiver:
        port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
        options = OutputOptions(str(file), f"http://127.0.0.1:{port}", protocol, SpanLevel.TREES, None, level)
        outputs = Outputs(options, served_engine.bus, served_engine.run_info, served_engine.vocabulary, None)
        with running(served_engine, debug_socket=str(socket), privacy=level) as server:
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, **ASKED}
            answer = server.post("/v1/completions", body, headers=CALLER).json()["choices"][0]["text"]
            client = AttachedCommands(str(socket))
            told = "\n".join(asked(client, LOOKS))
            client.close()
            page = str(server.serving.service.observed.page()[0])
        outputs.close()
    assert answer
    info = next(info for record in records for info in record.admitted)
    output = next(end.output.tolist() for record in records for end in record.finished)
    sent = [(span.name, span.attributes) for _, span in received(taken)]
    ways = {"file": file.read_text(), "network": repr(sent), "debug socket": told}
    for word in (PROMPT, STOP, LABEL):
        found = {name for name, text in ways.items() if word in text}
        assert found <= (set() if level else set(ways))
        assert level or {"file", "network"} <= found
        assert word not in page
    names_ids = level < Privacy.NO_TOKENS
    for tokens in (info.prompt_tokens.tolist(), output):
        assert tells(of_file(file), tokens) is tells(rows(sent), tokens) is names_ids
    assert ('"251":' in ways["file"].replace("\\", "")) is names_ids  # of the bias, and below of what a debugger shows
    assert bool(re.search(r"#[0-9]", told)) is names_ids
    assert ("#?" in told) is not names_ids
    assert read_capture(file).history.run.privacy is level
