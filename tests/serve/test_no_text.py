"""--no-text: no text of a request leaves the server but to its own client."""

import pytest

from specscope.remote.receiver import Receiver
from specscope.remote.vllm_console import AttachedCommands
from specscope.trace.outputs import OutputOptions, Outputs
from specscope.trace.reading import read_capture
from specscope.trace.spans import SpanLevel
from tests.serve.running import running

PROMPT = "quokkas"  # the tiny model has a token for each of its bytes


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("text", [True, False], ids=["text", "no text"])
def test_it_leaves_by_no_way(served_engine, tmp_path, text, protocol):
    file, socket, taken = tmp_path / "a.jsonl", tmp_path / "s", []
    with Receiver(taken.extend) as receiver:
        port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
        options = OutputOptions(str(file), f"http://127.0.0.1:{port}", protocol, SpanLevel.TREES, None, text=text)
        outputs = Outputs(options, served_engine.bus, served_engine.run_info, served_engine.vocabulary, None)
        with running(served_engine, debug_socket=str(socket), text=text) as server:
            answer = server.complete(PROMPT, max_tokens=20, ignore_eos=True).json()["choices"][0]["text"]
            client = AttachedCommands(str(socket))
            told = [client.run(line) for line in ("info requests", "tree", "why")]
            client.close()
        outputs.close()
    assert answer
    sent = repr([one.read() for one in taken])
    silent = set() if text else {"file", "network", "debug socket"}
    ways = {"file": file.read_text(), "network": sent, "debug socket": "\n".join(told)}
    assert {name for name, written in ways.items() if PROMPT not in written} == silent
    if not text:
        for word in ("output.text", "tree.text", "drawing", "request.title", "request.prompt_tokens"):
            assert not [name for name, written in ways.items() if f"specscope.{word}" in written]
    assert read_capture(file).history.run.text is text
