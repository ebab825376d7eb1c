"""What each engine calls its figures on its page of metrics: a row an engine, and the only place with these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Names:
    """The names of one engine. What it does not report has none."""

    source: str  # in words
    prefix: str  # of all its metrics
    counters: Mapping[str, str]  # to the count of an Aggregate
    gauges: Mapping[str, str] = field(default_factory=dict)  # likewise
    averages: tuple[str, ...] = ()  # kept under their own names
    accepted_at: str = ""  # a counter with the label `position`
    created: str = ""  # when the counters began
    labels: tuple[str, ...] = ()  # that tell engines of one page apart
    plain: Mapping[str, str] = field(default_factory=dict)  # their values that need not be named
    left_out: Mapping[str, str] = field(default_factory=dict)  # samples with these labels are of no engine
    six_digits: bool = False  # numbers are written with six digits, so counts from a million on are rounded


VLLM = Names(
    "vLLM /metrics",
    "vllm:",
    {
        "vllm:spec_decode_num_drafts_total": "drafts",
        "vllm:spec_decode_num_draft_tokens_total": "drafted",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
        "vllm:generation_tokens_total": "emitted",
        "vllm:request_success_total": "requests",
    },
    {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv_usage",
        "vllm:gpu_cache_usage_perc": "kv_usage",  # before 0.11
    },
    accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    created="vllm:spec_decode_num_drafts_created",
    labels=("engine",),
)
# Counts are of the tokenizer manager, averages of each rank's scheduler; ranks of one engine say the same. The drafter
# has a worker of its own in some versions.
SGLANG = Names(
    "SGLang /metrics",
    "sglang:",
    {
        "sglang:spec_verify_calls_total": "drafts",
        "sglang:generation_tokens_total": "emitted",
        "sglang:num_requests_total": "requests",
    },
    {
        "sglang:num_running_reqs": "running",
        "sglang:num_queue_reqs": "waiting",
        "sglang:token_usage": "kv_usage",
    },
    averages=(
        "sglang:spec_accept_length",
        "sglang:spec_accept_rate",
        "sglang:spec_cap_length",
        "sglang:spec_block_accept_length",
        "sglang:spec_num_steps",
        "sglang:spec_num_draft_tokens",
        "sglang:gen_throughput",
    ),
    labels=("dp_rank", "engine_type"),
    plain={"engine_type": "unified"},
    left_out={"engine_type": "draft"},
)
LLAMACPP = Names(
    "llama.cpp /metrics",
    "llamacpp:",
    {
        "llamacpp:spec_decode_num_drafts_total": "drafts",
        "llamacpp:spec_decode_num_draft_tokens_total": "drafted",
        "llamacpp:spec_decode_num_accepted_tokens_total": "accepted",
        "llamacpp:tokens_predicted_total": "emitted",
    },
    {"llamacpp:requests_processing": "running", "llamacpp:requests_deferred": "waiting"},
    accepted_at="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
    six_digits=True,
)
BY_PREFIX = {names.prefix: names for names in (VLLM, SGLANG, LLAMACPP)}


def named(name: str) -> Names | None:
    """The names of the engine that a metric is of; None for a metric of no engine."""
    return next((names for prefix, names in BY_PREFIX.items() if name.startswith(prefix)), None)
