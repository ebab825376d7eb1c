"""What the plugin writes, sends and tells a debugger, with text and without."""

import pytest

from specscope.remote.receiver import Receiver
from specscope.trace.reading import read_capture
from specscope.trace.vocabulary import Vocabulary
from specscope.vllm import plugin
from specscope.vllm.console import VllmCommands
from specscope.vllm.debug_server import context
from specscope.vllm.debugger import Debugger
from specscope.vllm.guard import Guard
from specscope.vllm.scheduling import SchedulerHooks
from specscope.vllm.settings import Settings
from tests.vllm import test_run_info
from tests.vllm.stand import Engine, params

PIECES = {token: f"quokka{token} ".encode() for token in range(11)}


def recorded(monkeypatch, variables):
    """Run a request under the plugin's own witness; the debugger that it told."""
    debugger, ends = Debugger(), []
    monkeypatch.setattr(plugin, "_rank", lambda: 0)
    monkeypatch.setattr(plugin, "_vocabulary", lambda _: Vocabulary(PIECES))
    monkeypatch.setattr(plugin.atexit, "register", ends.append)
    runner, guard = test_run_info.runner("org/model"), Guard()
    runner.vllm_config.parallel_config = test_run_info.SimpleNamespace(data_parallel_rank=0)
    engine = Engine()
    engine.witness = plugin.witness(runner, Settings.read(variables), guard, SchedulerHooks(guard), debugger)
    engine.step({"a": []}, new={"a": ([1, 2, 3], params())})
    one = engine.step({"a": [3, 4, 5]})
    engine.ends("a", "length", [token for token in one.output[0].tolist() if token >= 0])
    engine.rest()
    for end in ends:
        end()
    assert not guard.is_off
    debugger.catch_up()
    return debugger


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("silent", [False, True], ids=["text", "no text"])
def test_text_leaves_it_by_no_way_where_it_is_told_so(tmp_path, monkeypatch, protocol, silent):
    file, taken = tmp_path / "a.jsonl", []
    with Receiver(taken.extend) as receiver:
        port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
        variables = {"SPECSCOPE_CAPTURE": str(file), "SPECSCOPE_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
        variables |= {"SPECSCOPE_OTLP_PROTOCOL": protocol} | ({"SPECSCOPE_NO_TEXT": "1"} if silent else {})
        debugger = recorded(monkeypatch, variables)
    sent = [(one.resource, one.read()) for one in taken]
    commands = VllmCommands(debugger)
    told = [commands.run(line) for line in ("info requests", "tree")] + [context(commands.session)]
    ways = {"file": file.read_text(), "network": repr(sent), "debug socket": "\n".join(told)}
    assert {name for name, written in ways.items() if "quokka" in written} == (set() if silent else set(ways))
    for name, written in ways.items():
        for attribute in ("prompt", "title", "prompt_tokens"):
            assert (f"specscope.request.{attribute}'" in written.replace('"', "'")) is not silent, (name, attribute)
    run = read_capture(file).history.run
    assert run.text is not silent
    assert {resource["specscope.run.text"] for resource, _ in sent} == {not silent}
