"""OpenAI's own client, as published, with its strict reading of every answer."""

import openai
import pytest


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", _strict_response_validation=True, max_retries=0
    ) as one:
        yield one


MESSAGES = [{"role": "system", "content": "say"}, {"role": "user", "content": "hello hello"}]


def test_a_chats_stream(client):
    asked = {"model": "", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert pieces[-1].usage.completion_tokens == 12


def test_what_vllm_has_more(client):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
    answer = client.completions.create(model="", prompt="abc", max_tokens=6, extra_body=extra)
    assert answer.usage.completion_tokens == 6


def test_models(client, server):
    (model,) = client.models.list().data
    assert model.id == server.serving.service.model


def test_errors_become_the_clients(client, server):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="", prompt="x", suffix="y")
    assert (bad.value.param, bad.value.code) == ("suffix", "400")
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.completions.create(model="", prompt="x" * 600)
