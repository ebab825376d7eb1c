"""Real vLLM stopped at a decision, ended in the ways in which people and machines end it, and beside the screen.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_debug.py
"""

import json
import re
import signal
from contextlib import ExitStack, closing, suppress

import psutil
import pytest

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands
from specscope.trace.wire.reading import read_capture
from tests.processes import SPECSCOPE, Terminal, free_port
from tests.vllm import planted
from tests.vllm.models import TARGET
from tests.vllm.record import start
from tests.vllm.served import EAGLE, LOAD_SECONDS, OFFLINE, OPTIONS, PYTHON, Server, ask
from tests.waiting import until, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
PROMPTS = ["The capital of France is", "The best way to learn a language is"]


class Vllm:
    """A vLLM that waits for its prompts, with the debugger's socket."""

    def __init__(self, folder, *, processes, tokens=80, **variables):
        """It samples if it is one process."""
        self.folder, self.socket, self.capture = folder, folder / "debug.sock", folder / "run.jsonl"
        params = {"temperature": 0} if processes else {"temperature": 0.8, "seed": 7}
        params |= {"max_tokens": tokens, "ignore_eos": True}
        run = {"name": "out", "prompts": PROMPTS, "params": [params] * len(PROMPTS)}
        job = planted.bundled(planted.eagle(3, planted.BUNDLED_HEAD)).job() | {"go": str(folder / "go"), "runs": [run]}
        variables |= {"SPECSCOPE_CAPTURE": str(self.capture), "SPECSCOPE_DEBUG_SOCKET": str(self.socket)}
        variables["SPECSCOPE_TEST_PROCESSES"] = str(int(processes))
        self.log = (folder / "vllm.log").open("w+")
        self.process = start(folder, job, PYTHON, self.log, self.log, **variables)

    def said(self):
        return (self.folder / "vllm.log").read_text()[-2000:]

    def attach(self):
        def attached():
            assert self.process.poll() is None, self.said()
            with suppress(UserError):  # it has not come so far
                return AttachedCommands(str(self.socket))

        return until(attached, says=self.said)

    def start(self):
        (self.folder / "go").touch()

    def outputs(self):
        assert self.process.wait(300) == 0, self.said()
        return json.loads((self.folder / "out.json").read_text())["outputs"]

    def close(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def vllm(tmp_path):
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(closing(Vllm(tmp_path, **settings)))


def step_of(client):
    """The step that vLLM runs, or has run last."""
    found = re.match(r"step (\d+) ", client.run("where"))
    return int(found[1]) if found else -1


@pytest.mark.parametrize("processes", [False, True], ids=["one process", "a worker process"])
def test_stop_at_an_unlikely_rejection_look_and_go_on(vllm, processes):
    one = vllm(processes=processes)
    client = one.attach()
    client.run("break reject if p < 0.1")
    one.start()
    said = client.run("continue")
    assert "breakpoint 1 (break reject if p < 0.1)" in said
    assert ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS" if processes else "without a limit") in said
    assert float(client.run("print p")) < 0.1
    node, at = int(client.run("print node")), step_of(client)
    looked = client.run(f"node {node}")
    assert ("greedy decoding takes the target's top token" if processes else "of the target's mass is left") in looked
    with pytest.raises(UserError, match="cannot go back"):
        client.run("reverse-next")
    assert {step_of(client) for _ in range(20)} == {at}
    client.run("delete")
    client.run("next")
    assert step_of(client) == at + 1
    with pytest.raises(UserError, match="another debugger is attached"):
        AttachedCommands(str(one.socket))
    client.run("quit")
    outputs = one.outputs()
    reader = read_capture(one.capture)
    requests = list(reader.history.requests.values())
    assert [[token for token, _ in request.output()] for request in requests] == outputs
    trial = judge(reader.history, source="run")
    assert [c.name for c in trial.checks if c.result is CheckResult.FAILED] == []


def test_it_goes_on_before_its_engine_gives_up(vllm):
    one = vllm(processes=True, tokens=100, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="6")
    client = one.attach()
    client.run("break reject if p < 0.1")
    one.start()
    assert "gives up after 6 s" in client.run("continue")
    until(lambda: client.run("info breakpoints").startswith("vLLM continued by itself after 3 s"))
    client.run("quit")
    assert [len(output) for output in one.outputs()] == [100, 100]


SHORT = ["anna has a cat", "bob sees two dogs", "a red house"]
WARM = {"temperature": 0.9}


def kept(capture):
    """(drafts, drafted, accepted) of a capture, and what its reader remarks."""
    reader = read_capture(capture)
    acceptance = reader.history.acceptance
    return (acceptance.drafts, acceptance.drafted, acceptance.accepted), reader.warnings


def test_what_vllm_counted_is_in_the_file_when_ctrl_c_follows_the_last_answer(tmp_path):
    """At once, on all of its processes. By itself its server kills the worker within a few milliseconds."""
    capture = tmp_path / "run.jsonl"
    with Server(tmp_path / "log", SPECSCOPE_CAPTURE=str(capture)) as server:
        counts = [server.counted(prompt, 60, **WARM, seed=at) for at, prompt in enumerate(SHORT)]
        server.signal(group=True)
        server.ended()
    assert kept(capture) == (tuple(map(sum, zip(*counts, strict=True))), [])


def test_a_crash_leaves_its_evidence_and_a_restart_takes_another_name(tmp_path):
    """What a supervisor does: the same command again. The first worker is killed while it generates."""
    capture, again = tmp_path / "run.jsonl", tmp_path / "run.2.jsonl"
    settings = {"SPECSCOPE_CAPTURE": str(capture)}
    with Server(tmp_path / "log", **settings) as server:
        assert f"; writing to {capture}; lacking nothing" in server.log.read_text()  # before any request
        whole = server.counted(SHORT[0], 40, **WARM)
        heard = heard_until(server, lambda: worker(server).kill())
        server.ended()
    evidence = capture.read_bytes()
    with Server(tmp_path / "log.2", **settings) as server:
        assert f"; writing to {again} ({capture} exists); lacking nothing" in server.log.read_text()
        counted = server.counted(SHORT[0], 40, **WARM)
        heard_again = heard_until(server, lambda: server.signal(signal.SIGTERM))
        server.ended()
    assert capture.read_bytes() == evidence
    (drafts, _, _), (remark,) = kept(capture)
    assert drafts > whole[0]
    assert remark == "1 of 2 requests did not end in this file"
    assert cut_off(capture) > heard / 2
    (drafts, _, _), remarks = kept(again)
    assert (drafts > counted[0], remarks) == (True, [])
    assert cut_off(again) >= heard_again


def worker(server):
    """The process that says that it watches."""
    (number,) = re.findall(r"specscope: watching vLLM \S+ \(process (\d+)", server.log.read_text())
    return psutil.Process(int(number))


def heard_until(server, end):
    """End it in the midst of a long answer; how many of its tokens the client had got."""
    heard = 0
    with ask(server.url, SHORT[1], 900, **WARM, seed=5, stream=True, return_token_ids=True) as answer:
        for line in answer:
            if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
                heard += len(choices[0].get("token_ids") or ())
            if heard > 60:
                end()
                return heard
    pytest.fail("the answer ended")


def cut_off(capture):
    """Tokens of the last request."""
    return len(list(read_capture(capture).history.requests.values())[-1].output())


class Screen(Terminal):
    """`specscope vllm --screen -- serve ...` on a terminal."""

    def __init__(self, size, *arguments):
        command = [*SPECSCOPE, "vllm", "--screen", "--python", PYTHON, "--", "serve", *arguments]
        super().__init__(command, size, **OFFLINE)

    def shows(self, *words):
        found = wait_for(lambda: all(word.encode() in self.screen for word in words), LOAD_SECONDS)
        assert found, self.screen[-3000:]


@pytest.mark.parametrize("size", [(24, 80), (40, 120)], ids=str)
@pytest.mark.parametrize(
    ("arguments", "why"), [((str(TARGET), "--no-such-flag"), "unrecognized arguments"), (("./no-such",), "Error")]
)
def test_a_vllm_that_dies_at_its_start_has_ended_and_says_why(size, arguments, why):
    terminal = Screen(size, *arguments)
    try:
        terminal.shows("loading", "failed", "exit code", why)
        drawn = len(terminal.screen)
        terminal.type("q")
        assert terminal.process.wait(LOAD_SECONDS) in (1, 2)
        assert wait_for(lambda: why.encode() in terminal.screen[drawn:]), terminal.screen[drawn:]
    finally:
        terminal.close()


def test_one_that_loads_shows_its_log_then_that_it_is_watched_then_its_steps():
    port = free_port()
    options = [*OPTIONS, "--port", str(port), "--served-model-name", "it", "--speculative-config", json.dumps(EAGLE)]
    terminal = Screen((24, 80), str(TARGET), *options)
    try:
        terminal.shows("vLLM is starting", "INFO", "watching vLLM", "idle", "Application startup complete")
        assert b"attached" not in terminal.screen
        ask(f"http://127.0.0.1:{port}", "anna has a cat", 20).close()
        terminal.shows("attached", "Acceptance")
        terminal.remember()
        terminal.type("q")
        assert terminal.process.wait(LOAD_SECONDS) == 0
        assert terminal.left() == []
    finally:
        terminal.close()
