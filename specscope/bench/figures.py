"""The figures of a run, under the names of vLLM's bench (benchmarks/serve.py), so that tools read both.

TTFT  first chunk with output, from sending the request
TPOT  (latency - TTFT) / (output tokens - 1), of requests with more than one
ITL   between two chunks with output: vLLM's. With speculation a chunk holds several tokens, so there is also
      itl_per_token, where each token of a chunk has its share of the chunk's gap
E2EL  the whole answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from specscope.bench.drive import LATE, LoadRun
from specscope.bench.stream import StreamedAnswer

TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL per chunk", "itl_per_token": "ITL per token", "e2el": "end to end"}


def times(answers: Sequence[StreamedAnswer]) -> dict[str, list[float]]:
    """Seconds by TIMES."""
    return {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [tpot for answer in answers if (tpot := answer.tpot) is not None],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "itl_per_token": [gap for answer in answers for gap in answer.token_gaps],
        "e2el": [answer.latency for answer in answers],
    }


def percentile_name(percentile: float) -> str:
    """The name of a percentile as in vLLM's JSON: p99, p99.9."""
    return f"p{percentile:g}"


def figures(run: LoadRun, percentiles: Sequence[float], *, detailed: bool = False) -> dict[str, Any]:
    """A run as plain values. A figure without data is None. Milliseconds where the name says so."""
    good = run.good
    values: dict[str, Any] = {**_about(run), **_rates(run, good)}
    for name, seconds in times(good).items():
        values |= _spread(name, np.array(seconds) * 1e3, percentiles)
    values |= _acceptance(run)
    values["errors_by_reason"] = dict(Counter(answer.error for answer in run.answers if answer.error).most_common())
    values["client_lag_p99_ms"], values["client_lag_max_ms"] = run.lag * 1e3, run.worst_lag * 1e3
    values["client_processor"] = run.processor / run.duration  # cores
    values["client_was_late"] = run.lag > LATE
    return values | (_details(run) if detailed else {})


def _about(run: LoadRun) -> dict[str, Any]:
    """What was run."""
    request = run.server.request
    return {
        "label": run.server.name,
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": (backend := "openai-chat" if request.chat else "openai"),
        "endpoint_type": backend,
        "base_url": run.server.url,
        "endpoint": run.server.path,
        "model_id": run.server.model,
        "num_prompts": run.asked,
        "request_rate": "inf" if run.load.rate is None else run.load.rate,
        "burstiness": run.burstiness,
        "max_concurrency": run.load.concurrency,
        "round": run.round,
        "temperature": request.temperature,
        "seed": request.seed,
    }


def _rates(run: LoadRun, good: Sequence[StreamedAnswer]) -> dict[str, Any]:
    """Counts and throughput."""
    output = sum(answer.output_tokens for answer in good)
    inputs = [answer.input_tokens for answer in good]
    known = None if None in inputs else sum(inputs)  # type: ignore[arg-type]
    return {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "dropped": run.in_flight,  # by Ctrl-C
        "total_input_tokens": known,
        "total_output_tokens": output,
        "tokens_counted_by": "server" if all(answer.told_tokens is not None for answer in good) else "chunks",
        "request_throughput": len(good) / run.duration,
        "output_throughput": output / run.duration,
        "total_token_throughput": None if known is None else (known + output) / run.duration,
        "max_output_tokens_per_s": _busiest_second(run, good),
        "max_concurrent_requests": run.peak,
        "mean_concurrent_requests": sum(answer.latency for answer in good) / run.duration,
        "prompt_tokens_cached": _cached(good) if run.cached is None else run.cached,
    }


def _busiest_second(run: LoadRun, good: Sequence[StreamedAnswer]) -> float | None:
    """The most output tokens in any second since the start; a chunk counts as one token if its count is not known."""
    seconds: Counter[int] = Counter()
    for answer in good:
        counts = [0, *answer.counts]
        grown = [1 if a is None or b is None else b - a for a, b in pairwise(counts)]
        for arrival, tokens in zip(answer.chunks, grown, strict=True):
            seconds[int(arrival - run.start)] += tokens
    return float(max(seconds.values())) if seconds else None


def _cached(good: Sequence[StreamedAnswer]) -> float | None:
    """Share of the prompts' tokens that a prefix cache held, where the responses say so."""
    pairs = [(answer.cached_tokens, answer.input_tokens) for answer in good if answer.cached_tokens is not None]
    total = sum(tokens or 0 for _, tokens in pairs)
    return sum(cached or 0 for cached, _ in pairs) / total if total else None


def _spread(name: str, values: np.ndarray[Any, Any], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles."""
    measures: dict[str, Any] = {"mean": np.mean, "median": np.median, "std": np.std}
    spread = {f"{key}_{name}_ms": float(of(values)) if len(values) else None for key, of in measures.items()}
    for percentile in percentiles:
        key = f"{percentile_name(percentile)}_{name}_ms"
        spread[key] = float(np.percentile(values, percentile)) if len(values) else None
    return spread


def _acceptance(run: LoadRun) -> dict[str, Any]:
    """Figures of speculation; empty where the server reports none. The rate is in per cent, as in vLLM's JSON."""
    acceptance = run.acceptance
    length = run.average if acceptance is None or acceptance.tau is None else acceptance.tau
    if acceptance is None or length is None:
        return {}
    return {
        "spec_decode_acceptance_length": length,
        "spec_decode_acceptance_rate": None if acceptance.rate is None else acceptance.rate * 100,
        "spec_decode_num_drafts": acceptance.told("drafts"),
        "spec_decode_draft_tokens": acceptance.told("drafted"),
        "spec_decode_accepted_tokens": acceptance.told("accepted"),
        "spec_decode_per_position_acceptance_rates": acceptance.per_position,
        "spec_decode_source": run.source,
    }


def _details(run: LoadRun) -> dict[str, list[Any]]:
    """The figures of each request, in the order of their answers."""
    answers = run.answers
    return {
        "input_lens": [answer.input_tokens for answer in answers],
        "output_lens": [0 if answer.error else answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft if answer.chunks else 0.0 for answer in answers],
        "itls": [answer.gaps for answer in answers],
        "latencies": [0.0 if answer.error else answer.latency for answer in answers],
        "start_times": [answer.sent - run.start for answer in answers],
        "errors": [answer.error for answer in answers],
    }
