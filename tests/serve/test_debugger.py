"""A debugger attaches to the server over its socket: clients wait while it stands, and get the same answers."""

import json
import os
import socket
import stat
import threading

import pytest

from specscope import Engine
from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands
from tests.serve.running import running
from tests.waiting import HANG_SECONDS, wait_for


@pytest.fixture
def debugged(served_engine, tmp_path):
    path = tmp_path / "debug.sock"
    with running(served_engine, debug_socket=str(path)) as server:
        server.path = path
        server.expected = server.complete(max_tokens=30).json()["choices"][0]["text"]
        yield server


def test_an_asynchronous_engine_finishes_what_was_launched_and_says_so(tiny, tmp_path):
    path = tmp_path / "debug.sock"
    engine = Engine(
        target=str(tiny), dtype="float32", kv_memory=0.01, drafter="ngram", async_scheduling=True, threads=1
    )  # fmt: skip
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
