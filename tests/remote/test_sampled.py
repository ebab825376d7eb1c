"""Sampled traces over the wire: real engines, real exporters, a real receiver, and the screens behind it."""

from __future__ import annotations

import pytest

from specscope import Engine, SamplingParams
from specscope.remote.receiver import Receiver
from specscope.trace.metrics import Metrics
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from specscope.trace.wire.unspan import Decoder, run_info
from tests.support.records import received

pytestmark = pytest.mark.usefixtures("patient")

PROMPTS = ["abcabcabc", "xyxyxyxy", "the cat sat", "abababab", "hello hello", "1 2 1 2 1 2"]
CALLERS = [f"00-{7:032x}-{9:016x}-01", f"00-{8:032x}-{9:016x}-00"]  # one whose span is sampled, one whose is not
KEPT = {"r0", "r2", "r4"}  # of PROMPTS
GREEDY, SAMPLED = SamplingParams(max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=20, temperature=1.5)


@pytest.fixture
def engine(tiny):
    return Engine(target=str(tiny), dtype="float32", kv_memory=0.02, drafter="ngram", ngram_min=1, max_batch=3)


def test_what_is_kept_arrives_whole_and_metrics_and_the_capture_have_everything(engine, tmp_path):
    taken, records, path = [], [], tmp_path / "run.jsonl"
    with Receiver(taken.append) as receiver:
        address = f"http://127.0.0.1:{receiver.grpc_port}"
        chosen = OutputOptions(str(path), address, "grpc", SpanLevel.TREES, 0, ratio=0.0)
        engine.subscribe(records.append, lossless=True)
        outputs = Outputs(chosen, engine.bus, engine.run_info, engine.vocabulary, GREEDY)
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, SAMPLED if number % 2 else GREEDY, traceparent=CALLERS[number % 2])
        while engine.busy:
            engine.step()
        engine.bus.flush()
        metrics = next(s.sink for s in engine.bus.subscriptions if isinstance(s.sink, Metrics))
        before = metrics.page()[0].decode()
        assert outputs.close() == []
    assert outputs.sampled == "kept 3 of 6 requests (3 by parent)"
    decoder = Decoder()
    got = [record for _, span in received(taken) for record in decoder.feed(span)] + decoder.flush()
    assert decoder.lost == 0
    sent = [(r.step, p) for r in records for p in r.requests if p.request in KEPT]
    assert [(r.step, p) for r in got for p in r.requests] == sent
    assert {end.info.id for record in got for end in record.finished} == KEPT
    assert run_info(received(taken)[0][0]).sampling == "ratio 0"
    generated = sum(part.emitted for record in records for part in record.requests)
    model = f'engine="0",model_name="{engine.run_info.target}"'
    assert f"vllm:generation_tokens_total{{{model}}} {float(generated)}" in before
    after = metrics.page()[0].decode()
    for decision, count in (("ratio", 0), ("parent", 3), ("left_out", 3)):
        assert f'specscope:trace_requests_total{{decision="{decision}",{model}}} {float(count)}' in after
    back = read_capture(path)
    assert (back.history.steps, back.warnings, back.history.run.sampling) == (records, [], "")
