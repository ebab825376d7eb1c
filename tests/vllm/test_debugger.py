"""vLLM's debugger over real sockets: a worker's thread with the plugin's hooks on one side, the console beyond."""

import errno
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch

from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands, DebugServer
from specscope.remote.held import HeldCommands
from specscope.trace.record.records import Outcome
from specscope.vllm.v1 import debugger, runner
from specscope.vllm.v1.call import SamplerCall
from specscope.vllm.v1.debugger import Limit
from tests.vllm.fakes import FakeVllm
from tests.waiting import HANG_SECONDS, until

REJECTION = "break reject if p < 0.1"


class Bench:
    """A fake vLLM with its socket."""

    def __init__(self, folder, **settings):
        self.vllm = FakeVllm(**settings)
        self.path = folder / "debug.sock"
        debugger = self.vllm.debugger
        commands = partial(HeldCommands, debugger, debugger.limit.describe)
        self.server = DebugServer(self.path, debugger.gate, lambda: "attached to a fake", commands)
        self.clients = []

    def attach(self):
        client = AttachedCommands(str(self.path))
        self.clients.append(client)
        return client

    def stopped(self):
        """A client, with vLLM stopped at an unlikely rejection."""
        client = self.attach()
        client.run(REJECTION)
        self.vllm.thread.start()
        return client, client.run("continue")

    def close(self):
        for client in self.clients:
            client.close()
        self.server.close()
        self.vllm.tokens, self.vllm.pause = 0, 0.0  # what runs ends with its step
        if self.vllm.thread.ident is not None:
            self.vllm.thread.join(HANG_SECONDS)
            assert not self.vllm.thread.is_alive(), "vLLM did not go on"
        assert not self.vllm.guard.errors


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**settings):
        made.append(Bench(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def still(vllm, seconds=0.3):
    """Whether it runs no step for a while."""
    before = vllm.steps
    time.sleep(seconds)
    return vllm.steps == before


def test_it_stops_at_an_unlikely_rejection_and_shows_it(bench):
    one = bench()
    client, said = one.stopped()
    assert "breakpoint 1 (break reject if p < 0.1)" in said
    assert "vLLM waits here without a limit" in said
    assert still(one.vllm)
    step = int(client.run("print step"))
    part = one.vllm.debugger.history.steps[-1].requests[0]
    name, node = client.run("print request"), int(client.run("print node"))
    part = next(p for p in one.vllm.debugger.history.steps[-1].requests if p.request == name)
    assert part.verdict.outcome[node] == Outcome.REJECTED
    assert part.verdict.p[node] < 0.1
    assert step == one.vllm.steps  # counted from 0: those before it are done, and this one is not
    shown = client.run(f"node {node}")
    assert "target, as sampled" in shown
    assert "of the target's mass is left" in shown
    assert "CONTRADICTION" not in shown
    assert "✗" in client.run("tree")


def test_other_ranks_that_wait_are_told_of(bench):
    _, said = bench(limit=Limit(3600.0, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", ranks=2)).stopped()
    assert "1 other rank may wait in a collective" in said
    assert "continues by itself after 300 s" in said  # half of what a collective waits


def test_going_back_and_forks_are_refused_with_the_reason(bench):
    client, _ = bench().stopped()
    for line in ("reverse-next", "reverse-continue", "reverse-step", "goto 0", "goto start", "run"):
        with pytest.raises(UserError, match="cannot go back"):
            client.run(line)
    for line, why in (
        ("fork accept=0", "cannot run a request twice"),
        ("force accept=0", "force is gone"),
        ("step", "next runs one"),
        ("branch 1", "branch"),
        ("check kv", "specscope audit"),
    ):
        with pytest.raises(UserError, match=why):
            client.run(line)


def test_next_runs_one_engine_step_and_pause_stops_a_run(bench):
    one = bench(tokens=200)
    one.vllm.pause = 0.01
    one.vllm.thread.start()
    client = one.attach()
    until(lambda: one.vllm.steps > 3)  # attaching alone stops nothing
    said = client.run("pause")
    assert "vLLM waits here" in said
    assert still(one.vllm)
    at = one.vllm.steps
    client.run("next")
    assert one.vllm.steps == at + 1
    client.run("next 3")
    assert one.vllm.steps == at + 4
    assert client.run("pause").startswith(f"step {at + 4} ")  # it stands already
    assert one.vllm.steps == at + 4
    client.run("until step == 30")
    assert one.vllm.steps == 30
    client.run("goto 33")
    assert one.vllm.steps == 33


def test_the_end_of_a_request_stops_it_too(bench):
    one = bench(tokens=20)
    client = one.attach()
    client.run("break finish")
    one.vllm.thread.start()
    said = client.run("continue")
    assert "breakpoint 1 (break finish)" in said
    name = said.split("\n")[0].split(", ")[1]
    assert one.vllm.debugger.history.requests[name].end is not None
    client.run("delete")
    assert "has ended" in client.run(f"finish {next(n for n in ('r0', 'r1') if n != name)}")


def test_conditions_over_several_steps_hold_as_in_our_own_engine(bench):
    one = bench(tokens=200)
    client = one.attach()
    client.run("break step if tau < 1.6 and index > 5")
    one.vllm.thread.start()
    client.run("continue")
    assert float(client.run("print tau")) < 1.6
    assert int(client.run("print index")) > 5
    assert client.run("print before_accepted") != "None"
    assert client.run("print gap") == "1"


def test_commands_of_a_breakpoint_run_where_it_stops(bench):
    one = bench(requests=1)
    client = one.attach()
    client.run(REJECTION)
    client.run("commands 1")
    assert client.reading
    client.run("print step")
    client.run("where")
    client.run("end")
    assert not client.reading
    one.vllm.thread.start()
    said = client.run("continue")
    assert f"\n{one.vllm.steps}\n" in said
    assert said.count(f"step {one.vllm.steps} ") == 2


def test_what_ran_before_it_was_attached_is_known(bench):
    one = bench(tokens=200)
    one.vllm.pause = 0.005
    one.vllm.thread.start()
    for _ in range(2):  # and what ran while none was attached
        until(lambda before=one.vllm.steps: one.vllm.steps > before + 12)
        client = one.attach()
        client.run("next")
        history = one.vllm.debugger.history
        assert [record.step for record in history.steps] == list(range(one.vllm.steps + 1))
        assert float(client.run("print tau")) > 1
        assert "context: … " in client.run("node 0")
        client.run("quit")


def test_the_socket_is_this_users_alone(bench):
    mode = bench().path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_second_debugger_is_told_that_there_is_one(bench):
    one = bench()
    first = one.attach()
    with pytest.raises(UserError, match="another debugger is attached"):
        one.attach()
    first.run("quit")
    assert first.quitting
    assert one.attach().run("info breakpoints") == "no breakpoints"


CLIENT = """
import sys
from specscope.remote.held import HeldCommands
from specscope.remote.debug_socket import AttachedCommands
client = AttachedCommands(sys.argv[1])
client.run("break reject if p < 0.1")
print(client.run("continue"), flush=True)
print("stopped", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("waits", [False, True], ids=["while it holds", "while it waits"])
def test_a_debugger_that_is_killed_lets_vllm_go_on(bench, waits):
    one = bench(tokens=400, requests=1)
    line = "print(client.run('until step < 0'))" if waits else ""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT.replace("sys.stdin.read()", f"{line}\nsys.stdin.read()"), str(one.path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: one.vllm.debugger.gate.is_open)
        one.vllm.pause = 0.005
        one.vllm.thread.start()
        for said in process.stdout:
            if said == "stopped\n":
                break
        if not waits:
            assert still(one.vllm)
        before = one.vllm.steps
        process.kill()
        until(lambda: one.vllm.steps > before + 2)
    finally:
        process.kill()
        process.wait()
    until(lambda: not one.vllm.debugger.gate.controlled)
    one.vllm.thread.join(HANG_SECONDS)
    assert len(one.vllm.contexts["r0"]) == 401


def test_a_client_that_left_lines_unread_does_not_hold_vllm(bench):
    """Piped lines arrive at once, and the client is gone before the second runs."""
    one = bench(tokens=400)
    one.vllm.pause = 0.005
    one.vllm.thread.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(one.path))
        client.sendall(b'{"line": "next"}\n{"line": "next"}\n{"line": "continue"}\n{"line": "continue"}\n')
    before = one.vllm.steps
    until(lambda: one.vllm.steps > before + 5)


def test_it_goes_on_by_itself_before_its_engine_gives_up_and_says_so(bench):
    one = bench(limit=Limit(1.0, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"), tokens=400)
    one.vllm.pause = 0.005
    client, said = one.stopped()
    assert "gives up after 1 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), so it continues by itself after 0.5 s" in said
    before = one.vllm.steps
    until(lambda: one.vllm.steps > before + 3)
    said = client.run("info breakpoints")
    assert said.startswith("vLLM went on by itself after 0.5 s: pause stops it again")
    assert "vLLM is running" in client.run("node 0")
    assert "vLLM waits here" in client.run("pause")


def test_control_c_ends_the_wait_of_a_vllm_that_runs_nothing(bench):
    one = bench()
    client = one.attach()
    began = time.monotonic()
    client.session.interrupted = lambda: time.monotonic() - began > 0.3
    said = client.run("continue")
    assert "interrupted" in said
    assert "stops at its next step" in said
    one.vllm.thread.start()
    until(lambda: one.vllm.debugger.gate.stands)
    assert one.vllm.steps == 0


def test_control_c_stops_a_run_at_its_next_step(bench):
    one = bench(tokens=2000)
    one.vllm.pause = 0.005
    one.vllm.thread.start()
    client = one.attach()
    began = time.monotonic()
    client.session.interrupted = lambda: time.monotonic() - began > 0.3
    assert "interrupted" in client.run("continue")
    until(lambda: one.vllm.debugger.gate.stands)  # it may have been between two steps
    assert still(one.vllm)


def test_its_output_is_the_same_with_a_debugger_that_only_looks(bench):
    plain = FakeVllm()
    plain.run()
    one = bench()
    client = one.attach()
    client.run("break reject")
    one.vllm.thread.start()
    for _ in range(10):
        client.run("continue")
        client.run("node 0")
    client.run("quit")
    one.vllm.thread.join(HANG_SECONDS)
    assert one.vllm.contexts == plain.contexts


def test_a_failing_debugger_never_reaches_vllm(bench, monkeypatch):
    one = bench(tokens=30)
    monkeypatch.setattr(one.vllm.debugger.history, "append", lambda record: 1 / 0)
    client = one.attach()
    one.vllm.thread.start()
    client._send({"line": "next"})
    one.vllm.thread.join(HANG_SECONDS)
    assert not one.vllm.thread.is_alive()
    assert len(one.vllm.contexts["r0"]) == 31
    assert one.vllm.guard.errors
    one.vllm.guard.errors = 0  # they were meant


def test_a_socket_that_a_process_left_behind_is_taken_over(tmp_path):
    path = tmp_path / "debug.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    vllm = FakeVllm()
    commands = partial(HeldCommands, vllm.debugger, vllm.debugger.limit.describe)
    server = DebugServer(path, vllm.debugger.gate, lambda: "here", commands)
    with pytest.raises(OSError, match="another process listens"):
        DebugServer(path, vllm.debugger.gate, lambda: "there", commands)
    client = AttachedCommands(str(path))
    assert client.greeting == "here"
    client.close()
    server.close()
    assert not path.exists()
    with pytest.raises(UserError, match="there is no such socket"):
        AttachedCommands(str(path))


def test_a_client_that_could_not_be_let_in_does_not_end_the_socket(bench):
    """Too many files were open, for one."""
    one = bench()
    real = one.server._socket

    class Failing:
        def accept(self):
            one.server._socket = real
            raise OSError(errno.EMFILE, "Too many open files")

    one.server._socket = Failing()
    one.attach().close()  # the one that the thread waits for already
    until(lambda: one.server._socket is real)
    assert one.attach().greeting == "attached to a fake"


def test_lines_that_are_no_protocol_end_the_client_alone(bench):
    one = bench()
    for sent in (b"\xff\n", b"[]\n", b"{}\n", b'{"line"', b"x" * 200_000):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(HANG_SECONDS)
            client.connect(str(one.path))
            client.recv(1000)
            with suppress(ConnectionError):  # it may have closed before it read all
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1000):
                    pass
    assert one.attach().run("info breakpoints") == "no breakpoints"


def test_vllm_waits_without_the_interpreters_lock(bench):
    """This thread goes on meanwhile, and the one that waits takes no processor."""
    one = bench()
    one.stopped()
    before = time.process_time() - time.thread_time()
    for _ in range(30):
        time.sleep(0.01)
    assert time.process_time() - time.thread_time() - before < 0.15  # of the other threads, in 0.3 s or more
    assert one.vllm.debugger.gate.stands


def test_the_console_runs_a_script_and_vllm_goes_on_at_its_end(bench, tmp_path):
    one = bench(tokens=200)
    script = tmp_path / "script"
    script.write_text(f"{REJECTION}\ncontinue\nwhere\nreverse-next\nwhere\n")
    command = [sys.executable, "-m", "specscope", "debug", "--attach", str(one.path), "--commands", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as console:
        until(lambda: one.vllm.debugger.gate.is_open)
        one.vllm.thread.start()
        out, err = console.communicate(timeout=HANG_SECONDS)
    assert console.returncode == 2
    assert "1 command failed, in line 4" in err
    assert "attached to a fake" in out
    assert "vLLM waits here" in out
    assert out.count("node ") > 2
    one.vllm.thread.join(HANG_SECONDS)
    assert len(one.vllm.contexts["r0"]) == 201


def test_a_console_whose_vllm_ends_says_so_and_ends(tmp_path):
    path = tmp_path / "debug.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        command = [sys.executable, "-m", "specscope", "debug", "--attach", str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as console:
            client, _ = server.accept()
            client.sendall(b'{"text": "attached", "refused": false}\n')
            console.stdin.write("continue\nwhere\n")
            console.stdin.flush()
            assert client.recv(100) == b'{"line": "continue"}\n'
            client.close()
            _, said = console.communicate(timeout=HANG_SECONDS)
            assert said.count("vLLM has ended") == 1
            assert console.returncode == 0


@pytest.mark.parametrize("sent", [b"HTTP/1.1 400\n", b"[]\n", b"{}\n"])
def test_a_socket_of_something_else_is_refused(tmp_path, sent):
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        threading.Thread(target=lambda: server.accept()[0].sendall(sent), daemon=True).start()
        with pytest.raises(UserError, match="not vLLM's debugger"):
            AttachedCommands(str(path))


class Late:
    """Verdicts that come when they are waited for, as from a device."""

    bytes = 0

    def __init__(self, judgements):
        self.judgements, self.is_there = judgements, False

    def ready(self):
        return self.is_there

    def wait(self):
        self.is_there = True

    def of(self, row):
        assert self.is_there
        return self.judgements.of(row)


def copies(call):
    """As on_host makes them of tensors on a device."""
    values = {name: getattr(call, name) for name in call.__dataclass_fields__}
    return SamplerCall(
        **{name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    )


def test_on_a_device_it_waits_for_the_verdicts_and_looks_at_copies(bench, monkeypatch):
    here = runner.judge_here
    monkeypatch.setattr(runner, "judge_here", lambda *args, **kwargs: Late(here(*args, **kwargs)))
    monkeypatch.setattr(debugger, "on_host", copies)
    one = bench()
    client, _ = one.stopped()
    at = int(client.run("print step"))
    assert [record.step for record in one.vllm.debugger.history.steps] == list(range(at + 1))
    shown = client.run(f"node {client.run('print node')}")
    assert "target, as sampled" in shown
    assert "CONTRADICTION" not in shown
