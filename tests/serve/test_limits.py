"""Clients that are slow, large, many, or gone: the right status, and no stall of others."""

import asyncio
import contextlib
import json
import socket
import threading
import tracemalloc

import httpx2
import pytest

from specscope.errors import UserError
from specscope.remote.http import Limits
from specscope.serve.requests import REFUSED
from specscope.serve.server import bind
from specscope.serve.service import ServeOptions
from tests.serve.running import http, running
from tests.waiting import HANG_SECONDS, wait_for

LONG = {"max_tokens": 400, "ignore_eos": True}


def talk(server, data, seconds=HANG_SECONDS):
    """Send raw bytes; what comes back until the connection ends."""
    with socket.create_connection(server.address, timeout=seconds) as raw:
        raw.sendall(data)
        got = b""
        while piece := raw.recv(65536):
            got += piece
    return got


def told(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.fixture(scope="module")
def strict(served_engine):
    """Little patience, little room."""
    limits = Limits(body_bytes=20_000, header_seconds=0.4, body_seconds=0.4, send_seconds=0.5)
    with running(served_engine, max_queue=1, limits=limits, api_key="sesame") as server:
        server.key = {"authorization": "Bearer sesame"}
        yield server


def request(body, length=None, extra=""):
    length = len(body) if length is None else length
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sesame\r\n{extra}"
    return f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode() + body


def test_errors_have_one_shape(server):
    cases = {
        404: server.post("/v1/nothing", {}),
        405: http.get(server.url + "/v1/completions"),
        415: http.post(server.url + "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}),
        400: server.complete(prompt="x", top_p=0),
    }
    for status, answer in cases.items():
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, status)
        assert set(error) == {"message", "type", "param", "code"}
    assert cases[405].headers["allow"] == "POST"
    assert server.complete(model="another").json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        *(
            ({"structured_outputs": form}, "structured_outputs")
            for form in ({"regex": "(a"}, {"json": {"$ref": "#"}}, {"regex": "a", "choice": ["b"]}, {})
        ),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "x" * 2000}, "prompt"),
        ({"logit_bias": {"299999": 1}}, "logit_bias"),
        ({"stream_options": {}}, "stream_options"),
        ({"n": 100}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_what_cannot_be_done_is_named(server, asked, param):
    answer = server.complete(**asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_is_not_implemented_is_refused_and_never_dropped(server):
    """In both kinds of request; null is taken everywhere."""
    names = [*REFUSED, "add_special_tokens"]
    for ask in (server.complete, server.chat):
        for name in names:
            error = ask(**{name: {"a": [1]}}).json()["error"]
            assert (error["code"], error["param"]) == (400, name)
            assert error["message"].startswith(f"{name} is not implemented: ")
        assert ask(**dict.fromkeys(names)).status_code == 200
    for name in names:
        message = {"role": "user", "content": "x", name: ["x"]}
        answer = server.chat(messages=[{"role": "user", "content": "x"}, message])
        assert (answer.status_code == 400) is (name in REFUSED)
        if name in REFUSED:
            assert answer.json()["error"]["param"] == f"messages[1].{name}"


def test_the_key(strict, caplog):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
        answer = strict.post("/v1/completions", {"prompt": "x"}, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert strict.post("/v1/completions", {"prompt": "x"}, headers=strict.key).status_code == 200
    assert http.get(strict.url + "/health").status_code == 200
    assert "sesame" not in caplog.text


def test_an_oversized_body_is_refused_before_it_is_read(strict):
    status, error = told(talk(strict, request(b"{", length=10**12)))
    assert (status, error["code"]) == (413, 413)
    chunked = request(b"", extra="transfer-encoding: chunked\r\n").replace(b"content-length: 0\r\n", b"")
    status, _ = told(talk(strict, chunked + b"4e20\r\n" + b" " * 20_000 + b"\r\n" + b"1\r\n \r\n"))
    assert status == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example", "origin": "http://evil.example"},  # DNS rebinding
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
    ids=str,
)
def test_a_web_page_cannot_use_it(server, headers):
    for answer in (
        server.post("/v1/completions", {"prompt": "x"}, headers=headers),
        http.get(server.url + "/v1/models", headers=headers),
        http.get(server.url + "/metrics", headers=headers),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, 403)
    tunnel = {"host": "localhost:9", "origin": "http://localhost:9"}
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=tunnel).status_code == 200


def test_a_body_says_what_it_is(server):
    """A page of another site may send a form or text without asking, and JSON not."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    kinds = [{}, *({"content-type": kind} for kind in ("", "text/plain", "application/x-www-form-urlencoded"))]
    for headers in kinds:
        answer = http.post(server.url + "/v1/completions", content=body, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["message"] == "the content type must be application/json"
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        answer = http.post(server.url + "/v1/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == 200


def test_bodies_that_never_end_take_what_there_is_for_all_of_them(served_engine):
    with running(served_engine, limits=Limits(body_bytes=2**20, bodies=3)) as server, contextlib.ExitStack() as stack:
        tracemalloc.start()
        for _ in range(60):
            raw = stack.enter_context(socket.create_connection(server.address, timeout=HANG_SECONDS))
            with contextlib.suppress(ConnectionError):  # refused meanwhile
                raw.sendall(request(b" " * (2**20 - 9), length=2**20))
        assert wait_for(lambda: count(server, "too_busy") >= 57)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 30 * 2**20
        stack.close()
        assert wait_for(lambda: server.complete().status_code == 200)


def count(server, reason):
    """Requests that were refused for this reason."""
    lines = http.get(server.url + "/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:admission_rejections_total{") and reason in line]
    return float(found[0].split()[-1]) if found else 0


def test_slow_senders_are_cut_off(strict):
    """After 0.4 s each. A server that was told no limits has patience for ten, and is waited for no longer."""
    told_nothing = Limits()
    seconds = min(told_nothing.header_seconds, told_nothing.body_seconds)
    assert told(talk(strict, request(b'{"prompt"', length=100), seconds))[0] == 408  # the body
    assert told(talk(strict, b"POST /v1/comp", seconds))[0] == 408  # the headers
    assert told(talk(strict, b"", seconds))[0] == 408  # nothing at all
    assert told(talk(strict, b"\x16\x03\x01\r\n\r\n"))[0] == 400  # no HTTP


def test_a_reader_that_takes_nothing_holds_nothing(served_engine):
    with running(served_engine, limits=Limits(send_seconds=0.3)) as server:
        body = json.dumps({"prompt": "x" * 400, "n": 20, "stream": True, "max_tokens": 100, "temperature": 0})
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            raw.connect(server.address)
            lowered = server.serving
            raw.sendall(request(body.encode()))
            for connection in wait_for_connections(lowered):
                connection.transport.set_write_buffer_limits(2048)
                connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            assert wait_for(lambda: server.waiting)
            assert server.empty()
            assert wait_for(lambda: not lowered.server.connections)


def wait_for_connections(serving):
    assert wait_for(lambda: serving.server.connections)
    return list(serving.server.connections)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_takes_the_blocks_along(server, stream):
    body = {"prompt": "abc", "stream": stream, "temperature": 0, **LONG}
    with socket.create_connection(server.address) as raw:
        raw.sendall(request(json.dumps(body).encode()))
        assert wait_for(lambda: server.blocks)
    before = server.engine.steps
    assert server.empty()
    assert server.engine.steps - before < 60, "it was decoded to its end"


def test_a_full_queue_is_429_and_others_go_on(strict):
    async def run():
        async with httpx2.AsyncClient(headers=strict.key, timeout=HANG_SECONDS) as client:
            body = {"prompt": "abcabc", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            return await asyncio.gather(*(client.post(strict.url + "/v1/completions", json=body) for _ in range(12)))

    answers = asyncio.run(run())
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4, "three run and one waits"
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert (refused.headers["retry-after"], refused.json()["error"]["type"]) == ("1", "RateLimitError")
    assert len({answer.text.partition('"choices"')[2][:400] for answer in answers if answer.status_code == 200}) == 1
    assert count(strict, "queue_full") == statuses.count(429)


def test_other_machines_need_a_key():
    for host in ("0.0.0.0", "::", "192.168.1.1"):
        with pytest.raises(UserError, match="--api-key"):
            bind(ServeOptions(host=host))
    bind(ServeOptions(host="0.0.0.0", port=0, api_key="k")).close()


def test_others_are_not_stalled_by_what_is_refused(server, monkeypatch):
    """Three megabytes are not made to tokens before others have been answered."""
    begun, others, answers, encode = threading.Semaphore(0), threading.Event(), [], server.engine.encode

    def held(*asked, **how):
        begun.release()
        assert others.wait(HANG_SECONDS)
        return encode(*asked, **how)

    monkeypatch.setattr(server.engine, "encode", held)
    long = "x" * 3_000_000
    threads = [threading.Thread(target=lambda: answers.append(server.complete(prompt=long))) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert begun.acquire(timeout=HANG_SECONDS)
        for _ in range(10):
            assert http.get(server.url + "/health", timeout=HANG_SECONDS / 2).status_code == 200
    finally:
        others.set()
    while any(thread.is_alive() for thread in threads):
        assert http.get(server.url + "/health", timeout=HANG_SECONDS).status_code == 200
    assert [answer.status_code for answer in answers] == [400] * 3
