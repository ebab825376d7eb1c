"""What the plugin writes, sends and tells a debugger, at each level of privacy."""

import re

import pytest

from specscope.remote.held import HeldCommands
from specscope.remote.receiver import Receiver
from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from specscope.vllm import plugin
from specscope.vllm.processes import engine_number
from specscope.vllm.scheduling import SchedulerHooks
from specscope.vllm.v1.debugger import Debugger
from tests.searching import of_file, rows, tells
from tests.support.records import received
from tests.vllm import test_run_info
from tests.vllm.stand import Engine, params

PROMPT, STOP = [1, 2, 3, 5, 4, 7], "wombat"
PIECES = {token: f"quokka{token} ".encode() for token in range(11)}


def recorded(monkeypatch, variables, *, ends_request=True):
    """Run a request under the plugin's own witness, and let its process end; the debugger that it told."""
    debugger, ends = Debugger(), []
    monkeypatch.setattr(plugin, "rank_of_worker", lambda: 0)
    monkeypatch.setattr(plugin, "_vocabulary", lambda *_: Vocabulary(PIECES))
    monkeypatch.setattr(plugin, "at_exit", ends.append)
    runner, guard = test_run_info.runner("org/model"), ErrorGuard()
    runner.vllm_config.parallel_config = test_run_info.SimpleNamespace(data_parallel_rank=0)
    engine = Engine()
    engine.witness = plugin.witness(runner, PluginSettings.read(variables), guard, SchedulerHooks(guard), debugger)
    engine.step({"a": []}, new={"a": (PROMPT, params(stop=[STOP]))})
    one = engine.step({"a": [3, 4, 5]})
    if ends_request:
        engine.ends("a", "length", [token for token in one.output[0].tolist() if token >= 0])
    engine.rest()
    for end in ends:
        end()
    assert not guard.is_off
    debugger.catch_up()
    return debugger


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("level", Privacy, ids=lambda level: level.name.lower())
def test_what_it_is_told_to_leave_out_leaves_it_by_no_way(tmp_path, monkeypatch, caplog, protocol, level):
    file, taken = tmp_path / "a.jsonl", []
    flags = {Privacy.NO_TEXT: "SPECSCOPE_NO_TEXT", Privacy.NO_TOKENS: "SPECSCOPE_NO_TOKENS"}
    with Receiver(taken.append) as receiver:
        port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
        variables = {"SPECSCOPE_CAPTURE": str(file), "SPECSCOPE_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
        variables |= {"SPECSCOPE_OTLP_PROTOCOL": protocol} | ({flags[level]: "1"} if level else {})
        debugger = recorded(monkeypatch, variables)
    sent = [(span.name, span.attributes) for _, span in received(taken)]
    commands = HeldCommands(debugger, debugger.limit.describe)
    told = [commands.run(line) for line in ("info requests", "tree", "why", "node 0")]
    ways = {"file": file.read_text(), "network": repr(sent), "debug socket": "\n".join(told)}
    for word, where in (("quokka", set(ways)), (STOP, {"file", "network"})):
        assert {name for name, written in ways.items() if word in written} == (set() if level else where)
    numbers = [int(number) for number in re.findall(r"(?:quokka|#)(\d+)", ways["debug socket"])]
    found = {"file": of_file(file), "network": rows(sent), "debug socket": [numbers]}
    names_ids = level < Privacy.NO_TOKENS
    assert {name for name, numbers in found.items() if tells(numbers, PROMPT)} == (set(ways) if names_ids else set())
    assert bool(re.search(r"#[0-9]", told[1])) is (level is Privacy.NO_TEXT)
    if not names_ids:
        assert "this shows tokens, which are left out here" in told[-1]
    assert ("text to anyone with the tokenizer" in caplog.text) is (level is Privacy.NO_TEXT)
    assert read_capture(file).history.run.privacy is level
    assert {resource["specscope.run.text"] for resource, _ in received(taken)} == {level is Privacy.EVERYTHING}


def test_what_runs_when_the_process_ends_is_ended_with_it(tmp_path, monkeypatch):
    """vLLM aborts it, and tells nobody."""
    file = tmp_path / "a.jsonl"
    recorded(monkeypatch, {"SPECSCOPE_CAPTURE": str(file)}, ends_request=False)
    reader = read_capture(file)
    (request,) = reader.history.requests.values()
    assert request.end.reason is FinishReason.CANCELLED
    assert request.end.output.tolist() == [token for token, _ in request.output()]
    assert reader.warnings == []


@pytest.mark.parametrize(
    ("numbers", "engine"),
    [
        ({"data_parallel_rank": 2}, 2),
        ({"data_parallel_rank": 0, "data_parallel_index": 3}, 3),  # of a dense model every engine has the rank 0
    ],
)
def test_each_engine_has_its_own_names(numbers, engine):
    config = test_run_info.SimpleNamespace(parallel_config=test_run_info.SimpleNamespace(**numbers))
    assert engine_number(test_run_info.SimpleNamespace(vllm_config=config)) == engine
