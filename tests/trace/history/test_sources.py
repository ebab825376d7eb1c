"""What is said of figures that an engine defines in its own way."""

import pytest

from specscope.trace.history.interval import COLUMNS, IntervalMeans, cells, definitions, interval_record, made_up, rate
from specscope.trace.history.stats import measure
from specscope.trace.record.aggregate import SYNTHETIC, Aggregate

SGLANG = {"sglang:spec_accept_length": 2.5, "sglang:spec_accept_rate": 0.5}
MEAN, DECODED = {"spec_accept_length": 2.6}, {"avg_decoded_tokens_per_iter": 2}
COUNTED = Aggregate("SGLang response", drafts=4, drafted=12, accepted=6, averages=MEAN)


@pytest.mark.parametrize(
    ("aggregate", "words"),
    [
        (Aggregate("vLLM /metrics", drafts=10, drafted=30, accepted=12), []),
        (Aggregate("vLLM log", drafts=10, accepted=12, averages={"mean acceptance length": 2.2}), []),
        (Aggregate("SGLang log", averages=SGLANG), ["its own interval", "tokens that are configured"]),
        (
            Aggregate("SGLang /metrics", drafts=4, averages=SGLANG),
            ["own interval", "configured", "a request ends"],
        ),
        (COUNTED, ["drafts are SGLang's verifications", "configured tokens, whatever was drafted"]),
        (Aggregate("SGLang response", averages=MEAN), ["the prompt's first token too"]),
        (Aggregate("serving bench", averages={"avg_spec_accept_length": 2.6}), ["since its server started"]),
        (Aggregate("TensorRT-LLM response", averages=DECODED), ["those without a draft too"]),
        (Aggregate(f"llama.cpp log, {SYNTHETIC}", drafts=1, accepted=1), ["made up"]),
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


@pytest.mark.parametrize("seconds", [0.04, 9.94, 99_999, 38_988_745.6, 1e12])
def test_a_page_of_months_fits_its_column(seconds):
    record = interval_record(0, 0, int(seconds * 1e9), Aggregate("x"))
    cell = cells(record, record.aggregate)["seconds"]
    assert len(cell) <= COLUMNS["seconds"]
    assert float(cell) == pytest.approx(seconds, rel=0.05, abs=0.05)


def test_averages_alone_are_averaged_over_intervals_and_counts_are_not():
    averages = [Aggregate("SGLang log", averages={"sglang:spec_accept_length": length}) for length in (2.0, 3.0)]
    assert IntervalMeans(averages).length(measure(averages)) == 2.5
    counted = [Aggregate("x", drafts=drafts, drafted=4 * drafts, accepted=drafts * 2) for drafts in (1, 9)]
    assert IntervalMeans(counted).length(measure(counted)) == 3
    assert IntervalMeans([]).rate(measure([])) is None
