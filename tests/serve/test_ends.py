"""How a server ends: it finishes, or hands back; and how a debugger attaches: clients wait, with the same answers."""

import json
import os
import signal
import socket
import stat
import threading
from collections import Counter
from pathlib import Path

import pytest

from specscope.cli.serve import SHUTDOWN_SECONDS
from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands
from specscope.remote.http import Limits
from specscope.serve.service import ServeOptions
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from tests.engines import tiny_engine
from tests.processes import room_for
from tests.serve.command import BODY, Command
from tests.serve.running import http, running
from tests.support.samples import PLANTED
from tests.waiting import HANG_SECONDS, wait_for


@pytest.fixture
def command(tiny, tmp_path):
    made = []

    def make(*flags):
        made.append(Command(tmp_path / "run.jsonl", *flags, model=tiny))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_sigterm_lets_requests_finish(command, tmp_path):
    """An older capture is kept, one that is deleted meanwhile is told, and the key of a file is what clients send."""
    old, new, kept, key = (tmp_path / name for name in ("run.jsonl", "run.2.jsonl", "kept", "key"))
    before = Path(PLANTED).read_bytes()
    old.write_bytes(before)
    key.write_text("sesame\n")
    server = command("--shutdown-timeout", "20", "--api-key-file", key)
    allowed = {"authorization": "Bearer sesame"}
    models = [
        http.get(server.url + "/v1/models", headers=headers).status_code
        for headers in ({}, {"authorization": "Bearer key"}, allowed)
    ]
    assert models == [401, 401, 200]
    assert f"specscope: {old} exists: capturing to {new}\n" in server.lines
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    kept.hardlink_to(new)
    new.unlink()
    lines = server.stream(allowed, max_tokens=150)
    first = next(lines)
    server.process.send_signal(signal.SIGTERM)
    *pieces, done = [first, *lines]
    assert done == "[DONE]"
    assert json.loads(pieces[-1])["choices"][0]["finish_reason"] == "length"
    assert server.end() == 1
    assert f"warning: {new} was deleted or replaced during the run: the capture is lost" in "".join(server.lines)
    assert old.read_bytes() == before
    assert ends(kept) == {"length": 1}


def ends(path):
    """How the requests of a capture ended."""
    reader = read_capture(str(path))
    assert not reader.warnings, reader.warnings
    return Counter(one.end.reason.value for one in reader.history.requests.values())


def test_what_does_not_finish_is_handed_back(served_engine):
    """A second signal does not wait."""
    over, whole = [], []
    served_engine.bus.subscribe(lambda record: over.extend(record.finished))
    asked = {**BODY, "max_tokens": 480}
    with running(served_engine, shutdown_seconds=600.0) as server:
        path = server.url + "/v1/completions"
        how = {"json": asked | {"stream": True}, "timeout": HANG_SECONDS}
        other = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", asked)))
        with http.stream("POST", path, **how) as answer:
            lines = filter(None, answer.iter_lines())
            next(lines)
            other.start()
            assert wait_for(lambda: len(served_engine.requests) == 2)
            server.stop()  # which asks twice
            *_, error, done = lines
        other.join(HANG_SECONDS)
        served_engine.bus.flush()
    assert done == "data: [DONE]"
    told = json.loads(error.removeprefix("data: "))["error"]
    assert (told["code"], "stopping" in told["message"]) == (503, True)
    assert (whole[0].status_code, whole[0].headers["retry-after"]) == (503, "1")
    assert Counter(end.reason.value for end in over) == {"cancelled": 2}


def test_by_default_it_has_stopped_within_five_seconds():
    """Whatever its clients do: what it waits for, one after the other."""
    assert ServeOptions().shutdown_seconds == SHUTDOWN_SECONDS
    assert SHUTDOWN_SECONDS + 2 * Limits().end_seconds <= 4  # then the engine's last step


def test_a_client_that_reads_nothing_does_not_hold_it(served_engine):
    """Its requests are handed back when the time for them is over."""
    ended = []
    served_engine.bus.subscribe(lambda record: ended.extend(record.finished))
    body = json.dumps({**BODY, "stream": True, "max_tokens": 480, "n": 8}).encode()
    with running(served_engine, shutdown_seconds=0.2) as server, socket.create_connection(server.address) as silent:
        silent.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode())
        silent.sendall(b"Content-Type: application/json\r\n\r\n" + body)
        assert wait_for(lambda: server.blocks)
        server.ask_to_stop()
        server.join()
        served_engine.bus.flush()
    assert Counter(end.reason.value for end in ended) == {"cancelled": 8}


def test_a_full_disk_costs_steps_of_the_capture_and_no_answer(served_engine, tmp_path):
    path, told = tmp_path / "run.jsonl", []
    options = OutputOptions(str(path), None, None, SpanLevel.TREES, None, True, drops=True)
    outputs = Outputs(
        options, served_engine.bus, served_engine.run_info, served_engine.vocabulary, None, tell=told.append
    )
    with running(served_engine) as server:
        with room_for(path.stat().st_size + 100):
            assert [server.complete(max_tokens=40).status_code for _ in range(2)] == [200, 200]
            served_engine.bus.flush()
            assert wait_for(lambda: told)
        assert server.complete().status_code == 200
    (lost,) = outputs.close()
    assert f"not captured: {path} could not be written" in lost
    assert "File too large: " in told[0]
    assert outputs.code == 1
    assert [one.state for one in read_capture(path).history.requests.values()][-1] == "length"


def test_a_failed_engine_fails_its_requests(served_engine, monkeypatch):
    answers = []
    with running(served_engine) as server:
        thread = threading.Thread(target=lambda: answers.append(server.complete(max_tokens=400, ignore_eos=True)))
        thread.start()
        assert wait_for(lambda: server.blocks)

        def broken(now):
            raise RuntimeError("planted")

        monkeypatch.setitem(served_engine.phases.run, "forward", broken)
        thread.join(HANG_SECONDS)
        server.join()
        monkeypatch.undo()
    assert (answers[0].status_code, answers[0].json()["error"]["message"]) == (500, "the engine failed: planted")
    assert "planted" in str(server.error)
    served_engine.current = None
    served_engine.cancel_all()
    while served_engine.busy:
        served_engine.step()


def test_the_callers_trace_is_continued(server):
    records = []
    one = server.engine.bus.subscribe(records.append)
    given = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=given)
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers={"traceparent": "00-xyz"})
    server.engine.bus.flush()
    server.engine.bus.subscriptions.remove(one)
    one.close()
    infos = [end.info for record in records for end in record.finished]
    assert [(info.traceparent, info.labels) for info in infos] == [
        (given["traceparent"], {"tracestate": "a=1"}),
        ("", {}),
    ]
    from specscope.trace.wire.spans import Encoder

    encoder = Encoder(server.engine.run_info, server.engine.vocabulary)
    spans = [span for record in records for span in encoder.encode(record) if span.name.startswith("text_completion")]
    assert (f"{spans[0].trace:032x}", f"{spans[0].parent:016x}") == tuple(given["traceparent"].split("-")[1:3])
    assert spans[1].parent == 0


@pytest.fixture
def debugged(served_engine, tmp_path):
    path = tmp_path / "debug.sock"
    with running(served_engine, debug_socket=str(path)) as server:
        server.path = path
        server.expected = server.complete(max_tokens=30).json()["choices"][0]["text"]
        yield server


def test_an_asynchronous_engine_finishes_what_was_launched_and_says_so(tiny, tmp_path):
    path = tmp_path / "debug.sock"
    engine = tiny_engine(tiny, drafter="ngram", async_scheduling=True)
    with running(engine, debug_socket=str(path)) as server:
        expected = server.complete(max_tokens=30).json()["choices"][0]["text"]
        client = AttachedCommands(str(path))
        assert "the step already launched is finished" in client.greeting
        client.run("break accept")
        waiting = Asking(server)
        assert "accept" in client.run("continue")
        assert not engine.pipeline.flying
        client.close()
        waiting.join(HANG_SECONDS)
        assert waiting.text == expected


class Asking(threading.Thread):
    """A client that waits for its answer."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.text = server, None
        self.start()

    def run(self):
        self.text = self.server.complete(max_tokens=30).json()["choices"][0]["text"]


def test_a_line_that_is_no_command_is_refused_and_the_next_is_answered(debugged, caplog):
    bad = [b"[" * 60_000, b'{"line":' * 8_000, b"[]", b'{"line": 3}', b"\xff", b"not JSON"]
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(HANG_SECONDS)
        raw.connect(str(debugged.path))
        stream = raw.makefile("rb")
        assert not json.loads(stream.readline())["refused"]
        for line in bad:
            raw.sendall(line + b"\n")
            answer = json.loads(stream.readline())
            assert answer["refused"]
            assert answer["text"].startswith("a line must be JSON")
        raw.sendall(b'{"line": "help"}\n')
        assert not json.loads(stream.readline())["refused"]
    assert "Traceback" not in caplog.text
    assert debugged.complete().status_code == 200


def test_it_stops_looks_and_lets_go(debugged):
    assert stat.S_IMODE(os.stat(debugged.path).st_mode) == 0o600  # only this user may attach
    client = AttachedCommands(str(debugged.path))
    assert client.greeting.startswith("serving ")
    client.run("break reject")
    waiting = Asking(debugged)
    assert "reject" in client.run("continue")
    assert waiting.text is None
    steps = debugged.engine.steps
    for line in ("where", "tree", "node"):  # each is answered between two steps
        assert client.run(line)
        assert debugged.engine.steps == steps, "it stands"
    assert client.run("next")
    client.close()
    waiting.join(HANG_SECONDS)
    assert waiting.text == debugged.expected
    assert debugged.engine.timeline is None


def test_it_goes_back_and_forks_and_no_token_comes_twice(debugged):
    client = AttachedCommands(str(debugged.path))
    before = debugged.engine.steps - 2  # it ran by itself then
    client.run("break reject")
    waiting = Asking(debugged)
    client.run("continue")
    client.run("delete")
    client.run("next 3")
    client.run("reverse-next 2")
    with pytest.raises(UserError, match="cannot go back"):
        client.run(f"goto {before}")
    assert "fork" in client.run("fork temperature=0.9 seed=4").lower()
    assert client.run("check kv")
    client.close()
    waiting.join(HANG_SECONDS)
    assert waiting.text == debugged.expected
    assert debugged.complete(max_tokens=30).json()["choices"][0]["text"] == debugged.expected
    assert debugged.empty()


def test_continue_waits_for_requests_until_it_is_interrupted(debugged):
    client = AttachedCommands(str(debugged.path))
    asked = threading.Event()
    client.session.interrupted = asked.is_set
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.run("continue")), daemon=True)
    thread.start()
    waiting = Asking(debugged)
    waiting.join(HANG_SECONDS)
    assert waiting.text == debugged.expected, "it runs while it continues"
    assert thread.is_alive()
    asked.set()
    thread.join(HANG_SECONDS)
    assert answers
    client.close()


def test_a_stopped_server_ends_all_the_same(served_engine, tmp_path):
    with running(served_engine, debug_socket=str(tmp_path / "s"), shutdown_seconds=0.0) as server:
        client = AttachedCommands(str(tmp_path / "s"))
        client.run("pause")
        thread = threading.Thread(target=lambda: server.complete(max_tokens=30), daemon=True)
        thread.start()
        assert wait_for(lambda: server.waiting)
        server.stop()
        assert not server.blocks
        client.close()
    assert not (tmp_path / "s").exists()
