"""`bench traces`: its sizes are those on the wire, and its formula gives what is measured."""

import json

import pytest
from click.testing import CliRunner

from benchmarks import traces
from benchmarks.__main__ import bench
from specscope.engine.config import EngineConfig
from specscope.remote.receiver import Receiver
from specscope.trace.wire.sending import Sender, SpanSink
from specscope.trace.wire.spans import SpanLevel


@pytest.fixture(scope="module", autouse=True)
def short_prompts():
    """A tiny model's context is short, and its tokens are bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "COPYING", ["abcabcabcabc", "one two one two one"])
        patch.setattr(traces, "PLAIN", ["the cat sat on the mat"])
        patch.setattr(traces, "REQUESTS", 10)
        patch.setattr(traces, "TOKENS", 16)
        yield


@pytest.fixture(scope="module")
def recorded(tiny, short_prompts):
    config = EngineConfig(target=str(tiny), dtype="float32", kv_memory=0.02, drafter="ngram", max_batch=4)
    return traces.recorded(config)


class Weighed(Receiver):
    """A receiver that counts the bytes that come."""

    bytes = 0

    def _take(self, body, kind, encoding="identity"):
        self.bytes += len(body)
        return super()._take(body, kind, encoding)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("level", [SpanLevel.TREES, SpanLevel.REQUESTS])
def test_the_bytes_are_those_that_a_receiver_gets(recorded, level):
    run, vocabulary, records = recorded
    wire = traces.WireSize()
    taken = []
    with Weighed(taken.append) as receiver:
        url = f"http://127.0.0.1:{receiver.http_port}/v1/traces"
        for sender in (wire, Sender(url, "http/protobuf")):
            sink = SpanSink(sender, run, vocabulary, level)
            for record in records:
                sink(record)
            sink.close()
        assert (wire.spans, wire.bytes) == (sum(export.spans for export in taken), receiver.bytes)


@pytest.mark.parametrize("level", list(SpanLevel)[1:])
def test_the_formula_gives_what_is_measured(recorded, level, monkeypatch):
    monkeypatch.setattr(traces, "KEPT", 80)
    sizes = traces.measured_sizes(*recorded, "full", level)
    whole = traces.measured(*recorded, sizes, 1.0)
    some = traces.measured(*recorded, sizes, 0.2)
    batches = [len(record.requests) for record in recorded[2]]
    told = sum(sizes.per_step(1.0, batch)[0] for batch in batches) / len(batches)
    assert whole.kept == 1
    assert told == pytest.approx(whole.expected_per_step)
    assert told == pytest.approx(whole.bytes_per_step, rel=0.01)
    assert 0.1 < some.kept < 0.3
    adjusted = some.expected_per_step * some.kept / 0.2
    assert 0.7 * some.bytes_per_step < adjusted < 1.4 * some.bytes_per_step
    assert some.zipped_per_step < some.bytes_per_step


def test_the_command_prints_and_writes(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "KEPT", 4)
    monkeypatch.setattr(traces, "REQUESTS", 4)
    monkeypatch.setattr(traces, "TOKENS", 6)
    out = tmp_path / "figures.json"
    flags = ["--target", tiny, "--dtype", "float32", "--kv-memory", "0.02", "--drafter", "ngram"]
    result = CliRunner().invoke(bench, ["traces", "--json", str(out), *flags], catch_exceptions=False)
    assert result.exit_code == 0
    assert "bytes/step" in result.stdout
    told = json.loads(out.read_text())
    assert list(told)[:4] == ["schema", "source", "exit", "warnings"]
    assert (told["schema"], told["exit"]) == ("specscope.bench.traces/1", 0)
    assert [(row["level"], row["evidence"], row["ratio"]) for row in told["rows"]][:4] == [
        ("trees", "full", 1.0),
        ("trees", "full", 0.1),
        ("trees", "full", 0.01),
        ("trees", "lean", 1.0),
    ]
    by_level = {(one["level"], one["evidence"]): one["request_bytes"] for one in told["sizes"]}
    assert by_level["trees", "full"] > by_level["trees", "lean"] > by_level["steps", "lean"]
