"""--no-text and --no-tokens: what a request said leaves the server by no way but to its own client."""

import re

import pytest

from specscope.errors import UserError
from specscope.remote.debug_socket import AttachedCommands
from specscope.remote.receiver import Receiver
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from tests.searching import of_file, rows, tells
from tests.serve.running import running
from tests.support.records import received

pytestmark = pytest.mark.usefixtures("patient")

PROMPT = "quokkas"  # the tiny model has a token for each of its bytes
STOP, LABEL = "wombat", "numbat"
ASKED = {"ignore_eos": True, "stop": [STOP], "logit_bias": {"251": 0.5}, "stop_token_ids": [250], "logprobs": 2}
CALLER = {"traceparent": f"00-{1:032x}-{1:016x}-01", "tracestate": f"a={LABEL}"}
LOOKS = ("info requests", "tree", "why", "node 0", "info drafter", "check kv", "fork seed=2")


def asked(client, lines):
    """What a debugger prints, refusals among it."""
    for line in lines:
        try:
            yield client.run(line)
        except UserError as error:
            yield str(error)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("level", Privacy, ids=lambda level: level.name.lower())
def test_it_leaves_by_no_way(served_engine, tmp_path, level, protocol):
    file, socket, taken, records = tmp_path / "a.jsonl", tmp_path / "s", [], []
    served_engine.bus.subscribe(records.append, lossless=True)
    with Receiver(taken.append) as receiver:
        port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
        options = OutputOptions(str(file), f"http://127.0.0.1:{port}", protocol, SpanLevel.TREES, None, level)
        outputs = Outputs(options, served_engine.bus, served_engine.run_info, served_engine.vocabulary, None)
        with running(served_engine, debug_socket=str(socket), privacy=level) as server:
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, **ASKED}
            answer = server.post("/v1/completions", body, headers=CALLER).json()["choices"][0]["text"]
            client = AttachedCommands(str(socket))
            told = "\n".join(asked(client, LOOKS))
            client.close()
            page = str(server.serving.service.observed.page()[0])
        outputs.close()
    assert answer
    info = next(info for record in records for info in record.admitted)
    output = next(end.output.tolist() for record in records for end in record.finished)
    sent = [(span.name, span.attributes) for _, span in received(taken)]
    ways = {"file": file.read_text(), "network": repr(sent), "debug socket": told}
    for word in (PROMPT, STOP, LABEL):
        found = {name for name, text in ways.items() if word in text}
        assert found <= (set() if level else set(ways))
        assert level or {"file", "network"} <= found
        assert word not in page
    names_ids = level < Privacy.NO_TOKENS
    for tokens in (info.prompt_tokens.tolist(), output):
        assert tells(of_file(file), tokens) is tells(rows(sent), tokens) is names_ids
    assert ('"251":' in ways["file"].replace("\\", "")) is names_ids  # of the bias, and below of what a debugger shows
    assert bool(re.search(r"#[0-9]", told)) is names_ids
    assert ("#?" in told) is not names_ids
    assert read_capture(file).history.run.privacy is level
