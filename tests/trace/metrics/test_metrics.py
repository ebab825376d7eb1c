"""Metrics, through a real Prometheus parser."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specscope.trace.history.stats import Acceptance
from specscope.trace.metrics import Metrics, log_line
from specscope.trace.record.records import (
    FinishReason,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    StepRecord,
)
from tests.counting import lines_run
from tests.support import records as made

MS = 1_000_000


def part(drafted: int, accepted: int, emitted: int | None = None, request: str = "a", **more: int) -> RequestStep:
    """A chain of `drafted` tokens of which the first `accepted` were accepted."""
    outcome = made.outcomes(drafted, range(accepted), range(accepted, min(accepted + 1, drafted)))
    tree, path = made.chain(range(drafted)), range(accepted)
    judged = made.verdict(outcome, path, kind=made.kind_of(tree.parent.tolist(), path))
    return made.part(request, tree, judged, **{"context": 10, "emitted": emitted} | more)


def record(step: int, parts: Sequence[RequestStep], start_ms: int | None = None, **change: object) -> StepRecord:
    start = (step * 100 if start_ms is None else start_ms) * MS
    during = (Phase("schedule", start, start + MS), Phase("commit", start + MS, start + 50 * MS))
    return made.record(step, parts, during, **{"blocks_used": 30, "blocks_free": 70} | change)


def info(name: str, prompt_tokens: int) -> RequestInfo:
    return made.info(name, tokens=[0] * prompt_tokens)


def end(name: str, reason: FinishReason) -> RequestEnd:
    return made.end(info(name, 1), reason=reason)


RECORDS = [
    record(
        0,
        [part(0, 0), part(0, 0, request="b")],
        admitted=(info("a", 12), info("b", 5)),
        waiting=4,
    ),
    record(1, [part(3, 3), part(3, 1, request="b")]),
    record(2, [part(2, 0), part(3, 2, emitted=1, request="b")], preempted=("c",), waiting=3),
    record(3, [part(1, 1)], finished=(end("b", FinishReason.EOS), end("c", FinishReason.CANCELLED)), blocks_used=60),
    record(4, [], finished=(end("a", FinishReason.STOP),), waiting=1, blocks_used=60, blocks_free=40),
]
COUNTERS = {
    "spec_decode_num_drafts": {(): 5},
    "spec_decode_num_draft_tokens": {(): 12},
    "spec_decode_num_accepted_tokens": {(): 7},
    "spec_decode_num_accepted_tokens_per_pos": {("0",): 4, ("1",): 2, ("2",): 1},
    "prompt_tokens": {(): 17},
    "generation_tokens": {(): 12},
    "num_preemptions": {(): 1},
    "request_success": {("stop",): 2, ("length",): 0, ("abort",): 1, ("error",): 0},
}
GAUGES = {"num_requests_running": 0, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.6}


def own(labels: dict) -> tuple[str, ...]:
    """The labels besides vLLM's two, which every series must carry."""
    assert labels["model_name"] == 'SmolLM2 "135M"'
    assert labels["engine"] == "0"
    return tuple(value for name, value in labels.items() if name not in ("model_name", "engine"))


def filled(**options: object) -> Metrics:
    metrics = Metrics('SmolLM2 "135M"', **options)
    for one in RECORDS:
        metrics(one)
    return metrics


def text_of(metrics: Metrics) -> str:
    return metrics.page()[0].decode()


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        sample.name: {own(s.labels): s.value for s in family.samples}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_prometheus_text_has_vllms_names() -> None:
    text = text_of(filled(lost=lambda: 2))
    want = {f"vllm:{name}_total": values for name, values in COUNTERS.items()}
    want |= {f"vllm:{name}": {(): pytest.approx(value)} for name, value in GAUGES.items()}
    want["specscope:lost_records_total"] = {(): 2}
    assert parsed(text) == want
    assert "# TYPE vllm:spec_decode_num_drafts_total counter\n" in text
    assert "# TYPE vllm:kv_cache_usage_perc gauge\n" in text


def test_before_the_first_record_everything_is_zero() -> None:
    found = parsed(text_of(Metrics('SmolLM2 "135M"')))
    assert found["vllm:spec_decode_num_drafts_total"] == {(): 0}
    assert found["vllm:kv_cache_usage_perc"] == {(): 0}


def test_the_log_line_is_vllms() -> None:
    counts = Acceptance(drafts=44, drafted=220, accepted=20, accepted_at=[16, 2, 2, 0, 0])
    assert log_line(counts, 220 / 18.70) == (
        "SpecDecoding metrics: Mean acceptance length: 1.45, Accepted throughput: 1.70 tokens/s, Drafted throughput: "
        "18.70 tokens/s, Accepted: 20 tokens, Drafted: 220 tokens, Per-position acceptance rate: 0.364, 0.045, 0.045, "
        "0.000, 0.000, Avg Draft acceptance rate: 9.1%"
    )


def test_no_line_where_nothing_was_drafted_and_no_division_by_zero() -> None:
    assert log_line(Acceptance(steps=5, emitted=5), 10) is None
    line = log_line(Acceptance(drafts=1, drafted=2, accepted=0, accepted_at=[0, 0]), 0)
    assert line is not None
    assert "Mean acceptance length: 1.00, Accepted throughput: 0.00" in line


def test_one_line_an_interval_in_the_records_time() -> None:
    lines: list[str] = []
    metrics = Metrics(log=lines.append, seconds=1.0)
    for step in range(25):  # a step every 100 ms, each 50 ms long: ten fit in a second
        metrics(record(step, [part(2, 1)]))
    assert len(lines) == 2
    assert "Accepted: 10 tokens, Drafted: 20 tokens" in lines[0]
    assert "Drafted throughput: 21.05 tokens/s" in lines[0]  # 20 in 950 ms
    metrics.close()
    assert len(lines) == 3
    assert "Accepted: 5 tokens, Drafted: 10 tokens" in lines[2]
    metrics.close()
    assert len(lines) == 3
    assert metrics.totals.acceptance.accepted == 25  # the totals go on over the intervals


def test_idle_time_between_two_requests_is_in_no_interval() -> None:
    lines: list[str] = []
    metrics = Metrics(log=lines.append, seconds=1.0)
    metrics(record(0, [part(2, 1)], start_ms=0))
    metrics(record(1, [part(2, 1)], start_ms=60_000))
    metrics.close()
    assert [line.count("Drafted throughput: 40.00 tokens/s") for line in lines] == [1, 1]


def test_a_step_of_eight_requests_is_cheap() -> None:
    """About 25 us where the trees' depths are known already, of the first record as of the last."""
    records = [record(n, [part(5, 2) for _ in range(8)]) for n in range(200)]
    metrics = Metrics(log=lambda _: None)
    work = [lines_run(metrics, one)[0] for one in records]
    assert max(work) < 2000  # 845 lines of Python each, at most 1,033
