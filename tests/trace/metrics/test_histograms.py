"""The histograms over requests, by Prometheus' and OpenMetrics' own parsers."""

from __future__ import annotations

import dataclasses
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from specscope.errors import UserError
from specscope.trace.metrics import HISTOGRAMS, OPENMETRICS, PLAIN, Metrics
from specscope.trace.record.aggregate import Reason
from specscope.trace.record.records import FinishReason, RequestInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.bus import Bus
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.sampling import ratio_keeps
from specscope.trace.wire.spans import Encoder, SpanLevel, own_trace
from tests.processes import free_port
from tests.support import records as made
from tests.trace.metrics.test_metrics import part
from tests.trace.strategies import RUN
from tests.waiting import HANG_SECONDS, until

MS = made.MS
RUN_OF_100 = dataclasses.replace(RUN, max_context=100)
LENGTH = "specscope:request_acceptance_length"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def asked(name: str, prompt: int = 12, **more: str) -> RequestInfo:
    return made.info(name, tokens=[0] * prompt, arrived=100 * MS, admitted=150 * MS, **more)


def life(
    info: RequestInfo, steps: list[tuple[int, int]], reason: FinishReason = FinishReason.LENGTH
) -> list[StepRecord]:
    """A request's steps, 100 ms and 20 ms long each: (drafted, accepted)."""
    parts = [part(drafted, accepted, request=info.id, index=1) for drafted, accepted in steps]
    output = [0] * sum(one.emitted for one in parts)
    return [
        made.record(
            number + 1,
            [one],
            admitted=(info,) if not number else (),
            finished=(made.end(info, output, reason),) if number == len(steps) - 1 else (),
        )
        for number, one in enumerate(parts)
    ]


def filled(records: list[StepRecord], ratio: float | None = None) -> Metrics:
    metrics = Metrics("m", run=RUN_OF_100, ratio=ratio)
    for record in records:
        metrics(record)
    return metrics


def samples(metrics: Metrics) -> list:
    """What a scraper that takes OpenMetrics reads."""
    page, kind = metrics.page(OPENMETRICS)
    assert kind.startswith(OPENMETRICS)
    return [sample for family in openmetrics_families(page.decode()) for sample in family.samples]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    [sample] = [one for one in samples(metrics) if one.name == name and labels.items() <= one.labels.items()]
    assert sample.labels.items() >= {"model_name": "m", "engine": "0"}.items()
    return sample.value


def exemplars(metrics: Metrics) -> dict[str, set[str]]:
    """The trace ids at each histogram."""
    ids: dict[str, set[str]] = {}
    for sample in samples(metrics):
        if sample.exemplar is not None:
            assert set(sample.exemplar.labels) == {"trace_id"}
            ids.setdefault(sample.name.removesuffix("_bucket"), set()).add(sample.exemplar.labels["trace_id"])
    return ids


def test_acceptance_length_of_each_request() -> None:
    metrics = filled(
        [*life(asked("a"), [(0, 0), (3, 3), (3, 0)]), *life(asked("b"), [(2, 0)]), *life(asked("c"), [(0, 0)])]
    )
    assert value(metrics, LENGTH + "_count") == 2, "c has no drafts"
    assert value(metrics, LENGTH + "_sum") == 2.5 + 1
    assert value(metrics, LENGTH + "_bucket", le="1.0") == 1, "of b, nothing was accepted"
    assert value(metrics, LENGTH + "_bucket", le="2.0") == 1
    assert value(metrics, LENGTH + "_bucket", le="2.5") == 2


@pytest.mark.parametrize("reason", FinishReason)
def test_a_request_that_fails_has_a_length_of_acceptance_and_no_latency(reason: FinishReason) -> None:
    metrics = filled(life(asked("a"), [(2, 1), (2, 1)], reason))
    ended = reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
    assert value(metrics, LENGTH + "_count") == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == ended
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 12 * ended
    assert value(metrics, "vllm:request_generation_tokens_sum") == 4 * ended


def test_latencies_and_lengths() -> None:
    metrics = filled(life(asked("a"), [(3, 1), (3, 1), (3, 0)]))  # each step ends 20 ms after it began
    for name, seconds in {
        "time_to_first_token_seconds": 0.02,  # arrived at 100 ms; the first step ends at 120
        "inter_token_latency_seconds": 0.2,
        "request_time_per_output_token_seconds": 0.2 / 4,
        "e2e_request_latency_seconds": 0.22,
        "request_queue_time_seconds": 0.05,
        "request_prefill_time_seconds": 0,  # admitted at 150 ms, after the step: never below nothing
        "request_decode_time_seconds": 0.2,
        "request_inference_time_seconds": 0.17,
        "request_prompt_tokens": 12,
        "request_generation_tokens": 5,
        "iteration_tokens_total": 3 * 4,
    }.items():
        assert value(metrics, f"vllm:{name}_sum") == pytest.approx(seconds), name


def test_the_buckets_of_lengths_are_vllms() -> None:
    metrics = filled(life(asked("a"), [(1, 1)]))
    for name in ("prompt", "generation"):
        found = [one.labels["le"] for one in samples(metrics) if one.name == f"vllm:request_{name}_tokens_bucket"]
        assert found == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]


def test_an_exemplar_is_the_trace_that_the_spans_are_in() -> None:
    alone, called = life(asked("a"), [(3, 3), (3, 0)]), life(asked("b", traceparent=CALLER), [(3, 0), (3, 0)])
    encoder = Encoder(RUN_OF_100, Vocabulary())
    spans = [span for record in (*alone, *called) for span in encoder.encode(record)]
    traces = {f"{span.trace:032x}" for span in spans if span.name == "decode_step"}
    assert traces == {f"{own_trace(RUN.run_id, 'a'):032x}", CALLER.split("-")[1]}
    found = exemplars(filled([*alone, *called]))
    assert found[LENGTH] == traces, "they are in two buckets"
    by_request = {*HISTOGRAMS, "vllm:request_prompt_tokens", "vllm:request_generation_tokens"}
    assert set(found) == by_request - {"vllm:iteration_tokens_total"}, "a step is of no one request"
    assert all(ids <= traces for ids in found.values())


def test_plain_text_has_no_exemplars_and_the_same_values() -> None:
    metrics = filled(life(asked("a"), [(3, 3), (3, 0)]))
    text = metrics.page()[0].decode()
    assert " # {" not in text
    plain = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in plain_families(text)
        for sample in family.samples
    }
    assert plain == {(one.name, *sorted(one.labels.items())): one.value for one in samples(metrics)}


ACCEPTS = (  # headers of curl, of Prometheus 2 and 3, and of whom it may concern
    ("*/*", PLAIN),
    ("text/plain", PLAIN),
    ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", PLAIN),
    ("application/openmetrics-text-no;version=1.0.0", PLAIN),
    (OPENMETRICS, OPENMETRICS),
    (f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
    (f"{OPENMETRICS};version=1.0.0;escaping=underscores;q=0.5,text/plain;version=1.0.0;q=0.3,*/*;q=0.1", OPENMETRICS),
    (f"{OPENMETRICS};version=one;escaping=,;;=", OPENMETRICS),
    (f"text/plain;q=0.5, {OPENMETRICS};q=0", PLAIN),
    (f"{OPENMETRICS} ; Q=0.000 , */*", PLAIN),
    (f"{OPENMETRICS};version=1.0.0;q=0,{OPENMETRICS};version=0.0.1;q=0.001", OPENMETRICS),
    (f"{OPENMETRICS};q=never", OPENMETRICS),
    ("Application/OpenMetrics-Text", OPENMETRICS),
)


def test_over_http_the_scraper_decides() -> None:
    metrics = filled(life(asked("a"), [(3, 3), (3, 0)]))
    url = f"http://127.0.0.1:{metrics.serve_prometheus(0)}/metrics"
    try:
        for accept, kind in ACCEPTS:
            request = urllib.request.Request(url, headers={"Accept": accept})
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
                assert answer.headers["Content-Type"].startswith(kind)
                text = answer.read().decode()
            assert (" # {" in text) == (kind == OPENMETRICS)
            assert '\nvllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 1.0\n' in text
        with pytest.raises(UserError, match=url.split("/")[2]):
            Metrics().serve_prometheus(int(url.split(":")[2].removesuffix("/metrics")))
    finally:
        metrics.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=HANG_SECONDS)


def test_the_metrics_port_has_them() -> None:
    bus, port = Bus(), free_port()
    options = OutputOptions(None, None, None, SpanLevel.OFF, port, ratio=0.9)
    outputs = Outputs(options, bus, RUN_OF_100, Vocabulary(), None)

    def page() -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{port}", headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            return answer.read().decode()

    try:
        for record in life(asked("a"), [(3, 3), (3, 0)]):
            bus.publish(record)
        until(lambda: f'{LENGTH}_count{{engine="0",model_name="a/model"}} 1.0' in page(), says=page)
        assert f'# {{trace_id="{own_trace(RUN.run_id, "a"):032x}"}} 2.5 ' in page()
    finally:
        outputs.close()


def test_a_request_whose_spans_are_not_sent_is_no_exemplar() -> None:
    names = [f"r{number}" for number in range(40)]
    kept = {name for name in names if ratio_keeps(own_trace(RUN.run_id, name), "", 0.5) is Reason.RATIO}
    assert 0 < len(kept) < 40
    records = [record for name in names for record in life(asked(name), [(3, 3), (3, 0)])]
    for ratio, chosen in ((0.5, kept), (None, set(names))):
        [newest] = exemplars(filled(records, ratio))[LENGTH]
        last = max(chosen, key=names.index)
        assert newest == f"{own_trace(RUN.run_id, last):032x}"


def test_what_ended_is_forgotten() -> None:
    metrics = filled([record for number in range(50) for record in life(asked(f"r{number}"), [(3, 3), (3, 0)])])
    assert not metrics._histograms._running
