"""Sums of intervals: in spans, in figures, in metrics and in a history; and what an engine defines in its own way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.trace.history.history import History
from specscope.trace.history.interval import (
    COLUMNS,
    cells,
    counts,
    definitions,
    interval_record,
    made_up,
    missing_text,
    rate,
)
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.metrics import Metrics
from specscope.trace.record.aggregate import SYNTHETIC, Aggregate
from specscope.trace.wire.otlp_json import ReadSpan
from specscope.trace.wire.unspan import Decoder
from tests.trace.samples import encoded
from tests.trace.strategies import aggregates

TOLD = Aggregate(
    source="vLLM /metrics",
    engine="0",
    drafts=143,
    drafted=429,
    accepted=50,
    emitted=193,
    accepted_at=(40, 8, 2),
    proposed_at=(143, 143, 143),
    running=3,
    waiting=0,
    kv_usage=0.25,
)
GAUGES = Aggregate("SGLang /metrics", averages={"sglang:spec_accept_length": 2.31, "sglang:spec_accept_rate": 0.44})


def interval(step, told, seconds=5):
    start = (1000 + step * seconds) * 10**9
    return interval_record(step, start, start + seconds * 10**9, told)


def feed(span, **changes):
    attributes = {**span.attributes, **{f"specscope.aggregate.{name}": value for name, value in changes.items()}}
    decoder = Decoder()
    plain = {name: value for name, value in attributes.items() if value is not None}
    return decoder, decoder.feed(ReadSpan(span.name, span.start_ns, span.end_ns, plain)) + decoder.flush()


def test_an_interval_is_one_engine_step_with_its_counts_as_arrays():
    (span,) = encoded([interval(0, TOLD)])
    assert span.name == "engine_step"
    attributes = span.attributes
    assert attributes["specscope.aggregate.accepted_at"] == [40, 8, 2]
    assert "specscope.aggregate.averages" not in attributes
    assert feed(span)[1] == [interval(0, TOLD)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drafts": 39}, "or counts more than `specscope.aggregate.drafts`"),
        ({"accepted_at": [1, 2, 0]}, "`specscope.aggregate.accepted_at` rises"),
        ({"accepted_at": None}, "`specscope.aggregate.proposed_at` holds 3 values, not 0"),
        ({"proposed_at": [143]}, "`specscope.aggregate.proposed_at` holds 1 values, not 3"),
        ({"averages": ["a"]}, "`specscope.aggregate.average_values` are not one for each name"),
        ({"averages": ["a", "a"], "average_values": [1.0, 2.0]}, "are not one for each name"),
        ({"averages": ["a"], "average_values": [float("nan")]}, "in `specscope.aggregate.average_values[0]`"),
        ({"accepted_at": [1] * 5000}, "in `specscope.aggregate.accepted_at`"),
    ],
)
def test_a_damaged_interval_is_left_out_and_named(changes, why):
    decoder, back = feed(encoded([interval(0, TOLD)])[-1], **changes)
    assert back == []
    assert why in decoder.faults.lines()[0]


def test_figures_of_intervals():
    sums = measure([TOLD, Aggregate("x", drafts=57, drafted=171, accepted=0, accepted_at=(0, 0, 0))])
    assert (sums.tau, sums.rate) == (pytest.approx(1 + 50 / 200), pytest.approx(50 / 600))
    assert sums.per_position == pytest.approx([0.2, 0.04, 0.01])
    assert sums.per_position_corrected == [None, None, None]  # the second does not tell how long its drafts were
    assert sums.conditional == [None, None, None]
    assert (sums.told("emitted"), sums.told("drafts"), sums.told("steps")) == (None, 200, None)
    assert sums.depth_rate is None
    alone = measure([TOLD])
    assert alone.per_position_corrected == pytest.approx([40 / 143, 8 / 143, 2 / 143])
    assert alone.conditional == pytest.approx([40 / 143, 8 / 40, 2 / 8])
    told = alone.to_dict()
    assert (told["steps"], told["kinds"], told["intervals"]) == (None, None, 1)


def test_what_a_gauge_does_not_tell_no_figure_tells():
    sums = measure([GAUGES])
    assert (sums.tau, sums.rate, sums.per_position, sums.conditional) == (None, None, [], [])
    assert measure([TOLD, GAUGES]).tau is None
    assert GAUGES.length == 2.31
    assert Aggregate("x", averages={"sglang:spec_accept_length": 0.0}).length is None
    lacking = "Not available: trees, tokens, probabilities and coins"
    assert f"{lacking}, the number of drafts" in missing_text(GAUGES)
    assert missing_text(TOLD).endswith(lacking)


@given(st.lists(aggregates(), min_size=1, max_size=6), st.data())
def test_what_is_taken_back_was_never_there(told, data):
    keep = data.draw(st.integers(0, len(told)))
    history, sums, plain = History(), measure(told), measure(told[:keep])
    for step, one in enumerate(told):
        history.append(interval(step, one))
    assert history.counts_only
    assert history.acceptance == sums
    merged = Acceptance()
    for part in (told[:1], told[1:]):
        merged.merge(measure(part))
    assert merged == sums
    assert history.acceptance_at(keep - 1, None) == plain
    history.truncate(keep)
    assert (history.acceptance, history.acceptance.to_dict()) == (plain, plain.to_dict())
    history.keep_last(0)
    assert not history.counts_only


@given(aggregates())
def test_every_interval_can_be_written_as_cells_and_served_as_metrics(told):
    found = cells(interval(0, told), told)
    assert found.keys() == COLUMNS.keys()
    assert len(counts(told).per_position) in (0, len(told.accepted_at))
    assert missing_text(told)
    metrics = Metrics("m")
    metrics(interval(0, told))
    samples = [line for line in metrics.page()[0].decode().splitlines() if line and not line.startswith("#")]
    assert all(float(line.rpartition(" ")[2]) >= 0 for line in samples)
    metrics.close()


def test_metrics_of_intervals_are_those_that_were_told():
    metrics = Metrics("m", engine="1")
    metrics(interval(0, TOLD))
    metrics(interval(1, TOLD))
    text = metrics.page()[0].decode()
    assert 'vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 286.0' in text
    assert 'per_pos_total{engine="1",model_name="m",position="1"} 16.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25' in text
    assert "vllm:prompt_tokens_total{" not in text  # which the source does not tell
    metrics(interval(2, GAUGES))
    text = metrics.page()[0].decode()
    assert "vllm:spec_decode_num_drafts_total{" not in text  # a sum of which a part is not known is none
    assert "vllm:num_requests_running{" not in text


SGLANG = {"sglang:spec_accept_length": 2.5, "sglang:spec_accept_rate": 0.5}
MEAN = {"spec_accept_length": 2.6}
COUNTED = Aggregate("SGLang response", drafts=4, drafted=12, accepted=6, averages=MEAN)


@pytest.mark.parametrize(
    ("aggregate", "words"),
    [
        (Aggregate("vLLM /metrics", drafts=10, drafted=30, accepted=12), []),
        (Aggregate("vLLM log", drafts=10, accepted=12, averages={"mean acceptance length": 2.2}), []),
        (Aggregate("SGLang log", averages=SGLANG), ["average over its interval", "accepted / configured tokens"]),
        (
            Aggregate("SGLang /metrics", drafts=4, averages=SGLANG),
            ["over its interval", "configured", "a request ends"],
        ),
        (COUNTED, ["drafts are SGLang's verifications", "configured tokens, however many were drafted"]),
        (Aggregate("SGLang response", averages=MEAN), ["the prompt's first token"]),
        (Aggregate("serving bench", averages={"avg_spec_accept_length": 2.6}), ["since the server started"]),
        (Aggregate(f"llama.cpp log, {SYNTHETIC}", drafts=1, accepted=1), ["synthetic"]),
    ],
)
def test_what_is_defined_otherwise_is_said(aggregate, words):
    lines = definitions(aggregate)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line


def test_a_length_that_is_an_average_is_shown_unless_nothing_ran():
    """SGLang's gauges keep their last value when its engine is idle."""
    busy = Aggregate("SGLang /metrics", drafts=0, emitted=0, running=3, averages=SGLANG)
    idle = Aggregate("SGLang /metrics", drafts=0, emitted=0, running=0, averages=SGLANG)
    assert (busy.length, rate(busy)) == (2.5, 0.5)
    assert (idle.length, rate(idle), definitions(idle)[1:]) == (None, None, [])


def test_made_up_verdicts_are_known_by_the_source_or_the_rule():
    assert made_up([Aggregate(f"vLLM log, {SYNTHETIC}")])
    assert made_up([], ["standard", "lossy:synthetic"])
    assert not made_up([Aggregate("vLLM log")], ["standard", "lossy:typical"])
