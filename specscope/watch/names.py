"""What each engine, and each tool whose results people have, calls its figures: a row each, and the only place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specscope.trace.record.aggregate import LENGTH


@dataclass(frozen=True)
class Names:
    """The names on one engine's page of metrics. What it does not report has none."""

    source: str  # in words
    prefix: str  # of all its metrics: before a colon, or before an underscore where a collector passed them on
    counters: Mapping[str, str]  # to the count of an Aggregate
    gauges: Mapping[str, str] = field(default_factory=dict)  # likewise
    averages: tuple[str, ...] = ()  # kept under their own names
    accepted_at: str = ""  # a counter with the label `position`
    rank: str = ""  # the one label of a rank that tells engines apart: all others are inside of an engine
    plain: Mapping[str, str] = field(default_factory=dict)  # values of labels that need not be named
    left_out: Mapping[str, str] = field(default_factory=dict)  # samples with these labels are of no engine
    six_digits: bool = False  # numbers are written with six digits, so counts from a million on are rounded

    def __contains__(self, name: str) -> bool:
        return name == self.accepted_at or name in (*self.counters, *self.gauges, *self.averages)

    def tells_engines(self, name: str) -> bool:
        """Whether the labels of this metric are those of an engine: it is one of speculation."""
        is_count = self.counters.get(name) in ("drafts", "drafted", "accepted")
        return is_count or name == self.accepted_at or (name in self.averages and ":spec_" in name)


VLLM = Names(
    "vLLM /metrics",
    "vllm",
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
        "vllm:spec_decode_num_drafts_created": "created",
    },
    accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
)
# Counts are of the tokenizer manager, averages of each rank's scheduler; ranks of one engine say the same. The drafter
# has a worker of its own in some versions.
SGLANG = Names(
    "SGLang /metrics",
    "sglang",
    {
        "sglang:spec_verify_calls_total": "drafts",
        "sglang:generation_tokens_total": "emitted",
        "sglang:num_requests_total": "requests",
    },
    {"sglang:num_running_reqs": "running", "sglang:num_queue_reqs": "waiting", "sglang:token_usage": "kv_usage"},
    averages=(
        *(f"sglang:spec_{name}" for name in ("accept_length", "accept_rate", "cap_length", "block_accept_length")),
        *("sglang:spec_num_steps", "sglang:spec_num_draft_tokens", "sglang:gen_throughput"),
    ),
    rank="dp_rank",
    plain={"engine_type": "unified"},
    left_out={"engine_type": "draft"},
)
LLAMACPP = Names(
    "llama.cpp /metrics",
    "llamacpp",
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
# Of vLLM before 0.9 (V0), whose accepted tokens include those behind a rejection
V0, V0_LINE = "spec_decode_num_emitted_tokens", "Speculative metrics:"
NOT_V0 = "vLLM V0's figures are not read: its accepted tokens include those behind a rejected one"
BY_PREFIX = {names.prefix: names for names in (VLLM, SGLANG, LLAMACPP)}


def named(name: str) -> tuple[Names, str] | None:
    """The names of the engine that a metric is of, and what it calls it; None for a metric of no engine.

    A collector writes an underscore for the colon, and both a collector and vLLM's Python class leave out `_total`;
    Ray has its own name before vLLM's.
    """
    name = name.removeprefix("ray_")
    names = next((names for prefix, names in BY_PREFIX.items() if name.startswith((f"{prefix}:", f"{prefix}_"))), None)
    if names is None:
        return None
    own = f"{names.prefix}:{name[len(names.prefix) + 1 :]}"
    return next(((names, known) for known in (own, f"{own}_total") if known in names), None)


@dataclass(frozen=True)
class Tool:
    """The names in what an engine says of a request, or a tool of a run.

    Each is a path of keys, through all items of lists; `a|b` is the first of these that is there.
    """

    source: str
    known_by: str  # it is of this tool where that is there
    counts: Mapping[str, str] = field(default_factory=dict)  # to the count of an Aggregate
    averages: Mapping[str, str] = field(default_factory=dict)  # to the name under which it is kept
    places: tuple[str, ...] = ("",)  # of the object that has these, one of them
    histogram: str = ""  # steps by the tokens of each
    lengths: str = ""  # tokens of each step
    with_final: bool = False  # these count the bonus or recovered token
    drafted: str = ""  # tokens drafted in each step
    last_steps: str = ""  # the number of each turn's last step, from 0
    rates: str = ""  # accepted by position, of the drafts
    trees: bool = False  # what was drafted may be trees: how many reached a depth is not known


# What all of them call alike, of the whole answer or result
REQUEST = ("category", "question_id|metadata.x_request_id|id|request_id")
MODEL = "model_id|model"
PHASE = "metadata.benchmark_phase"  # "warmup": left out
ENDED, BEGAN = "created|tstamp|date|metadata.request_end_ns", "metadata.request_start_ns"
EMITTED = "usage.completion_tokens|data.usage.completion_tokens|meta_info.completion_tokens|completion_tokens"


def _counts(prefix: str, drafts: str, drafted: str, accepted: str, **others: str) -> dict[str, str]:
    """The keys of counts, to the counts of an Aggregate."""
    own = {f"{prefix}{drafts}": "drafts", f"{prefix}{drafted}": "drafted", f"{prefix}{accepted}": "accepted"}
    return own | {key: name for name, key in others.items()}


_AVERAGE = "avg_spec_accept_length"  # of SGLang, since the server started
_RATES = "spec_decode_per_position_acceptance_rates"
_METRICS = "metrics.speculative_decoding"  # within `data` in what llama-swap captured
_AIPERF = {"spec_decode_steps": "drafts", "draft_tokens": "drafted", "accepted_draft_tokens": "accepted"}
_TIMINGS = Tool(
    "llama.cpp response",
    "draft_n",
    {"draft_n": "drafted", "draft_n_accepted": "accepted", "predicted_n": "emitted"},
    places=("timings", ""),
)
_HISTOGRAM, _MEAN, _ROUNDS = "Acceptance_Length_Histogram", "mean_acceptance_length", "draft_rounds"
_LENGTHS = "choices.accept_lengths"
TOOLS = (
    Tool("SpecForge", "specforge", averages={"accept_length": "accept_length"}),
    Tool(  # its export over all requests; that of each request is below
        "AIPerf",
        "total_spec_decode_steps",
        {f"total_{name}.avg": count for name, count in _AIPERF.items()} | {"request_count.avg": "requests"},
    ),
    Tool(
        "serving bench",
        "spec_decode_num_drafts|spec_decode_acceptance_length|accept_length",  # the last is SGLang's
        _counts("spec_decode_", "num_drafts", "draft_tokens", "accepted_tokens", emitted="total_output_tokens")
        | {"completed": "requests"},
        {"spec_decode_acceptance_length": LENGTH, "accept_length": _AVERAGE},
        rates=_RATES,
    ),
    Tool(
        "vLLM example",
        "num_drafts",
        _counts("num_", "drafts", "draft_tokens", "accepted_tokens", emitted="total_num_output_tokens"),
        {_MEAN: LENGTH},
        rates="acceptance_at_token",
    ),
    Tool(
        "AIPerf",
        "spec_decode_acceptance.num_spec_steps",
        _counts("spec_decode_acceptance.", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        | {"metrics.output_sequence_length.value": "emitted"},
        histogram="spec_decode_acceptance.acceptance_histogram",
    ),
    Tool(
        "trtllm-bench",
        "decoding_stats.acceptance_length_percentiles",
        averages={"decoding_stats.acceptance_length_percentiles.average": LENGTH},
    ),
    Tool(
        "vLLM response",
        "num_draft_tokens",
        {"num_draft_tokens": "drafted"},
        places=(f"{_METRICS}|data.{_METRICS}|choices.speculative_decoding_stats", "spec_decode_metrics", ""),
        histogram="acceptance_histogram|histogram",
        lengths="per_step_accepted",
        drafted="per_step_drafted",
    ),
    Tool(
        "SGLang response",
        "spec_verify_ct",  # until 0.5.10, in 0.5.11, and from 0.5.12 on
        _counts(
            *("", "spec_verify_ct", "spec_num_proposed_drafts|spec_proposed_drafts|spec_draft_token_num"),
            "spec_num_correct_drafts|spec_accepted_drafts|spec_accept_token_num",
        ),
        {"spec_accept_length": "spec_accept_length", "spec_accept_rate": "spec_accept_rate"},
        places=("sglext.spec_tokens_details", "meta_info", "", "choices.meta_info"),
        histogram="spec_correct_drafts_histogram|spec_accept_histogram",
        trees=True,
    ),
    Tool("SGLang server_info", _AVERAGE, averages={_AVERAGE: _AVERAGE}, places=("internal_states",)),
    replace(_TIMINGS, source="mlx-vlm response", known_by=_ROUNDS, counts={_ROUNDS: "drafts", **_TIMINGS.counts}),
    _TIMINGS,
    Tool(
        "LM Studio response",
        "accepted_draft_tokens_count",
        {"total_draft_tokens_count": "drafted", "accepted_draft_tokens_count": "accepted"},
        places=("stats", "usage"),
    ),
    Tool("llama-speculative", "n_accept", {"n_drafted": "drafted", "n_accept": "accepted", "n_predict": "emitted"}),
    Tool("Spec-Bench", _LENGTHS, {"choices.new_tokens": "emitted"}, lengths=_LENGTHS, with_final=True),
    Tool("EAGLE", "choices.idxs", {"choices.new_tokens": "emitted"}, last_steps="choices.idxs"),
    Tool("specdec_bench", _HISTOGRAM, averages={"Average_AL": "Average_AL"}, histogram=_HISTOGRAM, with_final=True),
    Tool("list of lengths", "accept_lengths", lengths="accept_lengths", with_final=True),
    Tool("list of accepted tokens", "accepted_lengths", lengths="accepted_lengths"),
    Tool("result of means", _MEAN, averages={_MEAN: LENGTH}),
)
# What vLLM's example, the serving benches and llama-speculative print, a line each, and the keys of it
PRINTED = {"mean acceptance length": _MEAN, "mean acceptance length (including bonus tokens)": _MEAN}
PRINTED |= {name: name for name in ("total_num_output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")}
PRINTED |= {name: name for name in ("n_drafted", "n_accept", "n_predict")}
PRINTED |= {"Successful requests": "completed", "Benchmark duration (s)": "duration"}
PRINTED |= {"Total generated tokens": "total_output_tokens", "Accept length": "accept_length"}
PRINTED |= {"Acceptance length": "spec_decode_acceptance_length", "Drafts": "spec_decode_num_drafts"}
PRINTED |= {f"{word} tokens": f"spec_decode_{word.lower()}_tokens" for word in ("Draft", "Accepted")}
# Those with the number of a position, and what a rate of 1 is there
PRINTED_AT = {"acceptance at token": ("acceptance_at_token", 1), "Position": (_RATES, 100)}
