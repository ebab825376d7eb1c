"""Figures of answers whose times are known exactly."""

from types import SimpleNamespace

import numpy as np
import pytest

from specscope.bench.datasets import Load
from specscope.bench.drive import METRICS, LoadRun
from specscope.bench.endpoint import RequestOptions
from specscope.bench.figures import TIMES, figures
from specscope.bench.stream import StreamedAnswer
from specscope.trace.history.stats import measure
from specscope.trace.record.aggregate import Aggregate

# What `vllm bench serve --save-result` of vLLM 0.32.0 wrote for a chat of a server with speculation
VLLM = set(
    """
    date endpoint_type backend label model_id num_prompts request_rate burstiness max_concurrency duration
    completed failed total_input_tokens total_output_tokens request_throughput output_throughput
    total_token_throughput max_output_tokens_per_s max_concurrent_requests spec_decode_acceptance_rate
    spec_decode_acceptance_length spec_decode_num_drafts spec_decode_draft_tokens spec_decode_accepted_tokens
    spec_decode_per_position_acceptance_rates mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms
    median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms
    median_e2el_ms std_e2el_ms p99_e2el_ms
    """.split()  # noqa: SIM905
)
DETAILS = ["input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors"]


def run(answers, **fields):
    server = SimpleNamespace(
        name="A", url="http://x", path="/v1/chat/completions", model="tiny", request=RequestOptions()
    )
    return LoadRun(server, Load(concurrency=2), 0, 4, answers=answers, start=100.0, duration=5.0, peak=2, **fields)


def answer(sent, chunks, counts, **fields):
    known = {"input_tokens": 10, "told_tokens": counts[-1], "ended": chunks[-1]} | fields
    return StreamedAnswer(sent, chunks=chunks, counts=counts, whole=True, **known)


ANSWERS = [
    answer(100.0, [101.0, 101.5, 102.5], [1, 3, 7]),  # TTFT 1, E2EL 2.5, TPOT 0.25, gaps 0.5 of 2 tokens, 1.0 of 4
    answer(101.0, [103.0, 103.25], [1, 2], ended=103.5),  # TTFT 2, E2EL 2.5, TPOT 0.5, gap 0.25 of 1 token
    answer(104.0, [104.5], [1], input_tokens=20),  # TTFT 0.5 and one token
    StreamedAnswer(104.0, error="HTTP 429: slow down"),
]
DRAFTS = Aggregate("x", drafts=10, drafted=20, accepted=8, accepted_at=(6, 2), proposed_at=(10, 10))


def test_the_figures_are_what_their_definitions_say():
    told = figures(run(ANSWERS), [90, 99])
    assert (told["completed"], told["failed"], told["errors_by_reason"]) == (3, 1, {"HTTP 429: slow down": 1})
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (40, 10)
    assert told["request_throughput"] == 3 / 5
    assert told["output_throughput"] == 10 / 5
    assert told["total_token_throughput"] == 50 / 5
    seconds = {
        "ttft": [1.0, 2.0, 0.5],
        "tpot": [0.25, 0.5],
        "itl": [0.5, 1.0, 0.25],
        "itl_per_token": [0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25],
        "e2el": [2.5, 2.5, 0.5],
    }
    assert list(seconds) == list(TIMES)
    for name, values in seconds.items():
        assert told[f"mean_{name}_ms"] == pytest.approx(np.mean(values) * 1e3)
        assert told[f"median_{name}_ms"] == pytest.approx(np.median(values) * 1e3)
        assert told[f"std_{name}_ms"] == pytest.approx(np.std(values) * 1e3)
        for percentile in (90, 99):
            assert told[f"p{percentile}_{name}_ms"] == pytest.approx(np.percentile(values, percentile) * 1e3)
    assert told["mean_concurrent_requests"] == 5.5 / 5
    # tokens by second: 0: none, 1: 1 + 2, 2: 4, 3: 2, 4: 1
    assert told["max_output_tokens_per_s"] == 4.0


def test_the_names_are_vllms():
    told = figures(run(ANSWERS, acceptance=measure([DRAFTS]), source=METRICS), [99])
    assert set(told) >= VLLM
    assert told["request_rate"] == "inf"
    assert told["spec_decode_acceptance_length"] == 1.8
    assert told["spec_decode_acceptance_rate"] == 40.0  # vLLM's is in per cent
    assert told["spec_decode_per_position_acceptance_rates"] == [0.6, 0.2]
    counts = ("num_drafts", "draft_tokens", "accepted_tokens")
    assert [told[f"spec_decode_{name}"] for name in counts] == [10, 20, 8]
    assert "p99.9_ttft_ms" in figures(run(ANSWERS), [99.9])


def test_details_are_those_of_each_request():
    told = figures(run(ANSWERS), [99], detailed=True)
    assert set(DETAILS) <= set(told)
    assert told["ttfts"] == [1.0, 2.0, 0.5, 0.0]
    assert told["itls"] == [[0.5, 1.0], [0.25], [], []]
    assert told["output_lens"] == [7, 2, 1, 0]
    assert told["start_times"] == [0.0, 1.0, 4.0, 4.0]
    assert told["errors"] == ["", "", "", "HTTP 429: slow down"]
    assert not set(DETAILS) & set(figures(run(ANSWERS), [99]))


def test_where_nothing_was_answered_there_are_no_figures():
    for answers in ([], [StreamedAnswer(100.0, error="no answer after 1 s")]):
        told = figures(run(answers), [99])
        assert told["completed"] == 0
        assert [told[f"{kind}_{name}_ms"] for kind in ("mean", "p99") for name in TIMES] == [None] * 10
        assert (told["request_throughput"], told["max_output_tokens_per_s"]) == (0, None)
        assert not [name for name in told if name.startswith("spec_decode")]


def test_tokens_that_nobody_counts_are_chunks():
    uncounted = answer(100.0, [101.0, 102.0], [None, None], input_tokens=None)
    told = figures(run([uncounted]), [99])
    assert (told["total_input_tokens"], told["total_output_tokens"], told["tokens_counted_by"]) == (None, 2, "chunks")
    assert told["total_token_throughput"] is None
    assert told["median_itl_per_token_ms"] is None
    assert told["median_itl_ms"] == 1000.0
    assert told["max_output_tokens_per_s"] == 1.0
    assert figures(run(ANSWERS), [99])["tokens_counted_by"] == "server"


def test_all_tokens_of_a_first_chunk_are_in_its_second():
    first = answer(100.0, [101.5, 102.5], [5, 6])
    assert figures(run([first]), [99])["max_output_tokens_per_s"] == 5.0


def test_the_clients_own_lag_is_told():
    calm = figures(run(ANSWERS, lags=[0.001] * 990 + [0.3] * 5), [99])
    assert calm["client_lag_p99_ms"] == pytest.approx(1.0)
    assert calm["client_lag_max_ms"] == pytest.approx(300.0)
    assert calm["client_was_late"] is False
    assert figures(run(ANSWERS, processor=0.5), [99])["client_processor"] == 0.1
    assert figures(run(ANSWERS, lags=[0.001] * 90 + [0.3] * 10), [99])["client_was_late"] is True
    assert figures(run(ANSWERS, delays=[0.0, 0.02, 0.03]), [99])["client_was_late"] is True
    assert figures(run(ANSWERS), [99])["client_was_late"] is False


def test_cached_prompts_are_told():
    cached = [answer(100.0, [101.0], [1], cached_tokens=5), answer(100.0, [101.0], [1], cached_tokens=0)]
    assert figures(run(cached), [99])["prompt_tokens_cached"] == 5 / 20
    assert figures(run(cached, cached=0.75), [99])["prompt_tokens_cached"] == 0.75
    assert figures(run(ANSWERS), [99])["prompt_tokens_cached"] is None
