"""OpenAI's own client, as published, with its strict reading: streams, forms, log-probabilities, ends."""

import json
import threading

import openai
import pytest

from tests.serve.running import http
from tests.waiting import HANG_SECONDS

pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", _strict_response_validation=True, max_retries=0
    ) as one:
        yield one


MESSAGES = [{"role": "system", "content": "say"}, {"role": "user", "content": "hello hello"}]


def test_models_a_chats_stream_and_what_vllm_has_more(client, server):
    (model,) = client.models.list().data
    assert model.id == server.serving.service.model
    asked = {"model": "", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert pieces[-1].usage.completion_tokens == 12
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
    answer = client.completions.create(model="", prompt="abc", max_tokens=6, extra_body=extra)
    assert answer.usage.completion_tokens == 6


def test_errors_become_the_clients(client, server):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="", prompt="x", suffix="y")
    assert (bad.value.param, bad.value.code) == ("suffix", "400")
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.completions.create(model="", prompt="x" * 600)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_a_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model="", messages=MESSAGES, max_tokens=200, response_format=form, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"a", "b"}
    assert found["b"] in ("x", "yy")


@pytest.mark.parametrize(
    ("form", "good"),
    [
        ({"regex": "[ab]{3}c"}, lambda text: len(text) == 4 and set(text[:3]) <= {"a", "b"} and text[3] == "c"),
        ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, lambda text: len(text) == 3 and text[1].isdigit()),
    ],
)
def test_vllms_forms(client, form, good):
    answer = client.completions.create(model="", prompt="abc", max_tokens=50, extra_body={"structured_outputs": form})
    assert good(answer.choices[0].text), answer.choices[0].text


def test_logprobs_of_a_chat(client):
    asked = {"model": "", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**asked)
    told = answer.choices[0].logprobs.content
    assert len(told) == 6
    for one in told:
        assert one.logprob == one.top_logprobs[0].logprob, "greedy takes the likeliest"
        assert [x.logprob for x in one.top_logprobs] == sorted((x.logprob for x in one.top_logprobs), reverse=True)
        assert bytes(one.bytes).decode("utf-8", "replace") == one.token
    pieces = [p.choices[0].logprobs for p in client.chat.completions.create(**asked, stream=True)]
    streamed = [one for piece in pieces if piece for one in piece.content]
    assert [one.token for one in streamed] == [one.token for one in told]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in told], abs=1e-4)


def test_stop_tokens_and_min_tokens(client, server):
    ends = []
    sink = server.engine.bus.subscribe(lambda record: ends.extend(record.finished))
    server.complete("abc", max_tokens=6)
    server.engine.bus.flush()
    server.engine.bus.subscriptions.remove(sink)
    sink.close()
    tokens = ends[0].output.tolist()
    stop = tokens[2]
    assert stop not in tokens[:2]
    asked = {"model": "", "prompt": "abc", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**asked, extra_body={"stop_token_ids": [stop]})
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)
    assert answer.usage.completion_tokens == 3
    later = client.completions.create(**asked, extra_body={"stop_token_ids": [stop], "min_tokens": 5})
    assert later.usage.completion_tokens >= 5


def test_a_slow_regex_stalls_nobody(server, monkeypatch):
    """It is not compiled before others have been answered, and they go on while it is."""
    compiling, others, answers = threading.Event(), threading.Event(), []
    compile_ = server.engine.forms.grammars.compile

    def held(form):
        compiling.set()
        assert others.wait(HANG_SECONDS)
        return compile_(form)

    monkeypatch.setattr(server.engine.forms.grammars, "compile", held)
    slow = {"structured_outputs": {"regex": r"[ab]{0,200}"}}
    thread = threading.Thread(target=lambda: answers.append(server.complete(**slow)))
    thread.start()
    try:
        assert compiling.wait(HANG_SECONDS)
        for _ in range(3):
            assert server.complete(max_tokens=1).status_code == 200
    finally:
        others.set()
    while thread.is_alive():
        assert server.complete(max_tokens=1).status_code == 200
    assert answers[0].status_code in (200, 400)
    assert http.get(server.url + "/health").status_code == 200
