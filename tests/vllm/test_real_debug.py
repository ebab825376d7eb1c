"""Real vLLM stopped at a decision: SPECSCOPE_VLLM_PYTHON names its interpreter, with the plugin installed.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_debug.py
"""

import json
import re
from contextlib import ExitStack, closing, suppress

import pytest

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands
from specscope.trace.wire.reading import read_capture
from tests.vllm import planted
from tests.vllm.record import start
from tests.vllm.served import PYTHON
from tests.waiting import until

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
