"""vLLM's debugger over real sockets: a worker's thread with the plugin's hooks on one side, the console beyond."""

import re
import socket
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import count
from traceback import walk_stack
from types import SimpleNamespace

import pytest
import torch

from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands, DebugServer
from specscope.remote.held import Gate, HeldCommands
from specscope.trace.inside import gathered
from specscope.trace.record.records import Outcome
from specscope.vllm.v1 import debugger as module
from specscope.vllm.v1 import runner as v1_runner
from specscope.vllm.v1.debugger import Debugger
from tests.vllm.small import Engine, Request, Speculation, installed, params
from tests.waiting import HANG_SECONDS, until

REJECTION = "break reject if p < 0.1"
MP = {"distributed_executor_backend": "mp"}


class Bench:
    """A small vLLM on a thread, with its socket."""

    def __init__(self, folder, *, tokens=60, requests=2, pause=0.005, **engine):
        self.path, self.clients, self.stack = folder / "debug.sock", [], ExitStack()
        patch, made = self.stack.enter_context(pytest.MonkeyPatch.context()), []
        patch.setattr(module, "Debugger", lambda: made.append(Debugger()) or made[-1])
        self.said = self.stack.enter_context(installed(DEBUG_SOCKET=self.path))
        asked = [Request(f"r{n}", params(temperature=0.8, max_tokens=tokens + 9 * n)) for n in range(requests)]
        sampled = Speculation(draft_sample_method="probabilistic")
        self.engine, (self.debugger,) = Engine(asked, sampled, config={"max_model_len": 4096, **engine}), made
        self.engine.pause, self.gate, self.fails = pause, self.debugger.gate, False
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    @property
    def steps(self):
        return self.engine.steps

    def attach(self):
        self.clients.append(AttachedCommands(str(self.path)))
        return self.clients[-1]

    def stopped(self):
        """A client, with vLLM stopped at an unlikely rejection, and what it was told."""
        client = self.attach()
        client.run(REJECTION)
        self.thread.start()
        return client, client.run("continue")

    def place(self):
        """Where its thread is: the innermost frame."""
        return sys._current_frames()[self.thread.ident]

    def still(self):
        """Whether its thread waits at the gate, so that it runs no step until it is let on."""
        return self.gate.stands and Gate.stand.__code__ in [frame.f_code for frame, _ in walk_stack(self.place())]

    def goes_on(self, steps=3):
        """Until it has run some more."""
        before = self.steps
        until(lambda: self.steps > before + steps)

    def ends(self):
        self.thread.join(HANG_SECONDS)
        assert not self.thread.is_alive(), "vLLM did not continue"

    def close(self):
        for client in self.clients:
            client.close()
        self.engine.halt.set()
        until(lambda: not self.gate.controlled)
        if self.thread.ident is not None:
            self.ends()
        self.stack.close()
        assert self.fails == any("failed" in line for line in self.said), self.said


@pytest.fixture
def bench(tmp_path):
    with ExitStack() as benches:
        yield lambda **settings: benches.enter_context(closing(Bench(tmp_path, **settings)))


def test_it_stops_at_an_unlikely_rejection_and_shows_it(bench):
    one = bench()
    client, said = one.stopped()
    assert "breakpoint 1 (break reject if p < 0.1)" in said
    assert "vLLM waits here without a limit" in said
    assert one.still()
    name, node = client.run("print request"), int(client.run("print node"))
    part = next(part for part in one.debugger.history.steps[-1].requests if part.request == name)
    assert part.verdict.outcome[node] == Outcome.REJECTED
    assert part.verdict.p[node] < 0.1
    assert int(client.run("print step")) == one.steps  # counted from 0: those before it are done, and this one is not
    shown = client.run(f"node {node}")
    assert "of the target's mass is left" in shown
    assert "vLLM shows no whole distributions" in shown
    assert "✗" in client.run("tree")
    for line, why in (
        *((line, "cannot go back") for line in ("reverse-next", "reverse-continue", "goto start", "branch 1")),
        ("fork accept=0", "cannot run a request twice"),
        ("force accept=0", "force was removed"),
        ("step", "next runs one"),
        ("check kv", "specscope diagnose"),
    ):
        with pytest.raises(UserError, match=why):
            client.run(line)


def test_next_runs_one_engine_step_and_pause_stops_a_run(bench):
    one = bench(tokens=200, pause=0.01)
    one.thread.start()
    client = one.attach()
    one.goes_on()  # attaching alone stops nothing
    assert "vLLM waits here" in client.run("pause")
    assert one.still()
    at = one.steps
    for line, steps in (("next", 1), ("next 3", 4)):
        client.run(line)
        assert one.steps == at + steps
    assert client.run("pause").startswith(f"step {at + 4} ")  # it stands already
    for line, step in (("until step == 30", 30), ("goto 33", 33)):
        client.run(line)
        assert one.steps == step
    request = next(iter(one.debugger.history.requests.values()))
    ahead = request.steps[-1].index + 3
    client.run(f"goto {request.id}@{ahead}")  # a step that is still to come
    assert request.steps[-1].index == ahead


def test_the_socket_is_this_users_alone_and_takes_one_debugger(bench):
    one = bench()
    mode = one.path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    first = one.attach()
    with pytest.raises(UserError, match="another debugger is attached"):
        one.attach()
    first.run("quit")
    assert first.quitting
    assert one.attach().run("info breakpoints") == "no breakpoints"


CLIENT = """
import sys
from specscope.remote.debug_socket import AttachedCommands
client = AttachedCommands(sys.argv[1])
client.run("break reject if p < 0.1")
print(client.run("continue"), flush=True)
print("stopped", flush=True)
"""


@pytest.mark.parametrize("then", ["sys.stdin.read()", "client.run('until step < 0')"], ids=["holds", "waits"])
def test_a_debugger_that_is_killed_lets_vllm_go_on(bench, then):
    one = bench(tokens=400, requests=1)
    command = [sys.executable, "-c", CLIENT + then, str(one.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: one.gate.is_open)
            one.thread.start()
            assert "stopped\n" in iter(process.stdout.readline, "")
            assert "until" in then or one.still()
            process.kill()
            one.goes_on()
        finally:
            process.kill()
    until(lambda: not one.gate.controlled)
    one.ends()
    assert len(one.engine.outputs["r0"]) == 400


def test_it_goes_on_by_itself_before_its_engine_gives_up_and_says_so(bench):
    one = bench(parallel=MP, tokens=400)
    client, said = one.stopped()
    assert "gives up after 1 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), so it continues by itself after 0.5 s" in said
    one.goes_on()
    said = client.run("info breakpoints")
    assert said.startswith("vLLM continued by itself after 0.5 s")
    assert "vLLM waits here" in client.run("pause")


@pytest.mark.parametrize("runs", [False, True], ids=["nothing runs", "it runs"])
def test_control_c_ends_the_wait_and_vllm_stops_at_its_next_step(bench, runs):
    one = bench(tokens=2000)
    if runs:
        one.thread.start()
    client, looks = one.attach(), count()
    client.session.interrupted = lambda: next(looks) > 2
    said = client.run("continue")
    assert "interrupted" in said
    if not runs:
        assert "stops at its next step" in said
        one.thread.start()
    until(lambda: one.gate.stands)
    assert one.still()
    assert runs or one.steps == 0


def test_its_output_is_the_same_with_a_debugger_that_only_looks(bench, tmp_path):
    plain = bench()
    plain.engine.run()
    plain.close()
    one = bench()
    client = one.attach()
    client.run("break reject")
    one.thread.start()
    for _ in range(10):
        client.run("continue")
        client.run("node 0")
    client.run("quit")
    one.ends()
    assert one.engine.outputs == plain.engine.outputs


def test_a_failing_debugger_never_reaches_vllm(bench, monkeypatch):
    one = bench(tokens=30)
    one.fails = True
    monkeypatch.setattr(one.debugger.history, "append", lambda record: 1 / 0)
    client = one.attach()
    one.thread.start()
    client._send({"line": "next"})
    one.ends()
    assert len(one.engine.outputs["r0"]) == 30


def test_a_socket_that_a_process_left_behind_is_taken_over(tmp_path):
    path, debugger = tmp_path / "debug.sock", Debugger()
    with listening(path):
        pass
    commands = partial(HeldCommands, debugger, debugger.limit.describe)
    server = DebugServer(path, debugger.gate, lambda: "here", commands)
    with pytest.raises(OSError, match="another process listens"):
        DebugServer(path, debugger.gate, lambda: "there", commands)
    client = AttachedCommands(str(path))
    assert client.greeting == "here"
    client.close()
    server.close()
    assert not path.exists()
    with pytest.raises(UserError, match="there is no such socket"):
        AttachedCommands(str(path))


LINES = b'{"line": "next"}\n{"line": "next"}\n{"line": "continue"}\n{"line": "continue"}\n'


@pytest.mark.parametrize("sent", [b"\xff\n", b"[]\n", b"{}\n", b'{"line"', b"x" * 200_000, LINES], ids=range(6))
def test_a_client_that_sends_no_protocol_or_reads_nothing_ends_alone(bench, sent):
    one = bench(tokens=400)
    one.thread.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(HANG_SECONDS)
        client.connect(str(one.path))
        with suppress(ConnectionError):  # it may have closed before it read all
            client.sendall(sent)
            if sent != LINES:  # which leaves unread what it is told
                client.shutdown(socket.SHUT_WR)
                while client.recv(1000):
                    pass
    one.goes_on(5)
    until(lambda: not one.gate.controlled)
    assert one.attach().run("info breakpoints") == "no breakpoints"


def test_vllm_waits_without_the_interpreters_lock(bench):
    """This thread goes on meanwhile, and the one that waits does so once, in a lock: it takes no processor."""
    one = bench()
    client, _ = one.stopped()
    until(lambda: one.place().f_code is threading.Condition.wait.__code__)
    waits = one.place()
    for _ in range(30):
        client.run("info breakpoints")
        assert one.place() is waits
    assert one.still()


@contextmanager
def console(path, *words):
    """`specscope debug SOCKET`."""
    command = [sys.executable, "-m", "specscope", "debug", str(path), *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        yield process


def test_the_console_runs_a_script_and_vllm_goes_on_at_its_end(bench, tmp_path):
    one, script = bench(tokens=200), tmp_path / "script"
    script.write_text(f"{REJECTION}\ncontinue\nwhere\nreverse-next\nwhere\n")
    with console(one.path, "--commands", script) as process:
        until(lambda: one.gate.is_open)
        one.thread.start()
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 2
    assert "1 command failed, in line 4" in err
    assert re.search(r"attached to vLLM unknown, process \d+, org/model: ", out)
    assert "vLLM waits here" in out
    assert out.count("node ") > 2
    one.ends()
    assert len(one.engine.outputs["r0"]) == 200


@contextmanager
def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield server


def test_a_console_whose_vllm_ends_says_so_and_ends(tmp_path):
    path = tmp_path / "debug.sock"
    with listening(path) as server, console(path) as process:
        client, _ = server.accept()
        client.sendall(b'{"text": "attached", "refused": false}\n')
        process.stdin.write("continue\nwhere\n")
        process.stdin.flush()
        assert client.recv(100) == b'{"line": "continue"}\n'
        client.close()
        _, said = process.communicate(timeout=HANG_SECONDS)
        assert (said.count("the engine or its debugger has ended"), process.returncode) == (1, 0)


@pytest.mark.parametrize("sent", [b"HTTP/1.1 400\n", b"[]\n", b"{}\n"])
def test_a_socket_of_something_else_is_refused(tmp_path, sent):
    path = tmp_path / "other.sock"
    with listening(path) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(sent), daemon=True).start()
        with pytest.raises(UserError, match="no vLLM debugger listens there"):
            AttachedCommands(str(path))


def test_on_a_device_it_waits_for_the_verdicts(bench, monkeypatch):
    def late(packed):
        """(Zeros until somebody waits for them.)"""
        host, came = torch.zeros_like(packed), threading.Event()
        return host, SimpleNamespace(query=came.is_set, synchronize=lambda: (host.copy_(packed), came.set()))

    monkeypatch.setattr(gathered, "to_host", late)
    monkeypatch.setattr(v1_runner, "judge_here", v1_runner.judge_there)
    one = bench()
    client, _ = one.stopped()
    at = int(client.run("print step"))
    assert 0 < float(client.run("print p")) < 0.1
    assert [record.step for record in one.debugger.history.steps] == list(range(at + 1))
