"""Attaching: real exporters of real engines send spans to the screen's receiver, all of them or a sample."""

import pytest

from specscope import SamplingParams
from specscope.remote.attached import Attached
from specscope.remote.receiver import Receiver
from specscope.trace.metrics import Metrics
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from specscope.trace.wire.unspan import Decoder, run_info
from tests.engines import tiny_engine
from tests.support.records import received
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("patient")

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8)


def settle(viewer, steps):
    until(lambda: len(viewer.history.steps) >= steps, viewer.poll)


def send(tiny, port, rests=lambda records: None):
    """Run a small engine that exports there; its history by hand. `rests`: called when it has nothing more to do."""
    engine = tiny_engine(tiny, drafter="ngram", ngram_min=1)
    options = OutputOptions(None, f"http://127.0.0.1:{port}", "grpc", SpanLevel.TREES, None)
    outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, PARAMS)
    records = []
    engine.subscribe(records.append, lossless=True)
    engine.generate(["abcabcabc", "xyxyxyxy"], PARAMS)
    engine.bus.flush()
    rests(records)
    outputs.close()
    return records


@pytest.mark.parametrize(("host", "says"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_screen_that_other_machines_reach_says_who_may_write_to_it(host, says):
    attached = Attached(host, 0, 0)
    try:
        who = "any machine that reaches it can send, without a password"
        assert (who in attached.progress) == says
        assert [who in news.text for news in attached.news].count(True) == says
    finally:
        attached.close()


def test_what_an_engine_sends_is_shown_as_it_was(tiny, attached):
    """By gRPC; that HTTP brings the same, test_receiver.py has."""
    assert attached.status == "loading"
    assert "listening on 127.0.0.1:" in attached.progress
    records = send(tiny, attached.listening.grpc_port, lambda records: settle(attached.viewer, len(records)))
    assert (attached.status, attached.viewer.history.steps) == ("attached", records)
    assert attached.viewer.history.run.target
    attached.viewer.debug("break emit")
    attached.viewer.goto(0)
    attached.viewer.debug("continue")
    assert "breakpoint 1 (break emit)" in attached.viewer.news.pop().text


def test_memory_is_bounded(tiny, attached, monkeypatch):
    monkeypatch.setattr("specscope.remote.engines.MOST", 8)
    records = send(tiny, attached.listening.grpc_port)
    assert len(records) > 9
    until(lambda: attached.viewer.news, attached.viewer.poll)
    history = attached.viewer.history
    assert len(history.steps) <= 8
    assert history.steps == records[-len(history.steps) :]
    assert "lost the oldest" in attached.viewer.news[0].text
    assert all(request.info is not None for request in history.requests.values())
    assert 0 <= attached.viewer.position < len(history.steps)


PROMPTS = ["abcabcabc", "xyxyxyxy", "the cat sat", "abababab", "hello hello", "1 2 1 2 1 2"]


CALLERS = [f"00-{7:032x}-{9:016x}-01", f"00-{8:032x}-{9:016x}-00"]  # one whose span is sampled, one whose is not


KEPT = {"r0", "r2", "r4"}  # of PROMPTS


GREEDY, SAMPLED = SamplingParams(max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=20, temperature=1.5)


@pytest.fixture
def engine(tiny):
    return tiny_engine(tiny, kv_memory=0.02, drafter="ngram", ngram_min=1, max_batch=3)


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
    back = read_capture(path)
    assert (back.history.steps, back.warnings, back.history.run.sampling) == (records, [], "")
