"""What a source's figures are: which it lacks, and what it means by the others where that is not as in stats.py.

As read in their sources: SGLang 0.5.23 (metrics_reporter.py, tokenizer_manager.py, internal_state.py), TensorRT-LLM's
executor, llama.cpp b11434, and what tools document. vLLM's definitions are those of stats.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specscope.trace.record.aggregate import SYNTHETIC, Aggregate
from specscope.trace.record.rules import MADE_UP

# Of averages, by their names in an Aggregate
_AVERAGES: Mapping[str, str] = {
    "sglang:spec_accept_length": "the length is SGLang's average over its own interval: accepted + 1 per verification",
    "spec_accept_length": "the length is SGLang's: output tokens per verification, the prompt's first token too",
    "accept_length": "the length is SpecForge's average of a benchmark: output tokens per verification of SGLang",
    "avg_spec_accept_length": "the length is SGLang's average since its server started, not of this bench alone",
    "sglang:spec_accept_rate": "the rate is SGLang's: of the tokens that are configured, whatever was drafted",
    "spec_accept_rate": "the rate is SGLang's: of the tokens that are configured, whatever was drafted",
    "trtllm_spec_decode_acceptance_length": "the length is that of TensorRT-LLM's last iteration alone",
    "avg_decoded_tokens_per_iter": "the length is TensorRT-LLM's: tokens per iteration, those without a draft too",
}
_OURS = "1 + accepted / drafts, as here"
# Of counts: (how the source's name begins, the count, what it is)
_COUNTS: Sequence[tuple[str, str, str]] = (
    ("SGLang /metrics", "drafts", "drafts are SGLang's verifications, which it adds when a request ends"),
    ("SGLang response", "drafts", "drafts are SGLang's verifications"),
    ("SGLang response", "drafted", "drafted tokens are verifications × configured tokens, whatever was drafted"),
    ("llama.cpp /metrics", "drafts", "counts are added when a request ends"),
    ("vLLM example", "drafts", f"vLLM's mean acceptance length is {_OURS}"),
    ("vLLM example", "accepted_at", "counts by position are the nearest to rates that are printed with two digits"),
    ("serving bench", "drafts", f"the bench's acceptance length is {_OURS}"),
    ("AIPerf", "drafts", f"AIPerf's mean_acceptance_length is that of each request: {_OURS}"),
    (
        "Spec-Bench",
        "drafts",
        "Spec-Bench's mean accepted tokens are tokens per decoding step, the last one too: as here",
    ),
    (
        "EAGLE",
        "drafts",
        "EAGLE's acceptance length is new tokens / decoding steps: as here, were no step without a draft",
    ),
    ("specdec_bench", "drafts", f"specdec_bench's Average_AL is the mean of requests: here it is over all, {_OURS}"),
    ("result of means", "averages", "the length is a mean, as the file tells it"),
    ("list of lengths", "drafts", "each length is of a step, its bonus or recovered token too: none is 0"),
    ("list of accepted tokens", "drafts", "each length is of a step, without its bonus or recovered token"),
    ("TensorRT-LLM /metrics", "drafts", "drafts are those with a first token: TensorRT-LLM counts no others"),
)
_NOTHING = "verdicts are made up for a benchmark: acceptance measures nothing"


def definitions(aggregate: Aggregate) -> list[str]:
    """What its figures are, in words, where they are not as everywhere."""
    lines = [_AVERAGES[name] for name in (aggregate.length_name, aggregate.rate_name) if name in _AVERAGES]
    lines += [
        text
        for source, count, text in _COUNTS
        if aggregate.source.startswith(source) and getattr(aggregate, count) not in (None, ())
    ]
    return [*lines, *([_NOTHING] if SYNTHETIC in aggregate.source else [])]


def made_up(aggregates: Iterable[Aggregate], rules: Iterable[str] = ()) -> bool:
    """Whether these say that verdicts were made up, by their source or by the rules of steps."""
    return any(SYNTHETIC in aggregate.source for aggregate in aggregates) or any(rule in MADE_UP for rule in rules)


def missing(aggregate: Aggregate) -> list[str]:
    """What the source does not report, in words."""
    lacks = {
        "the number of drafts": aggregate.drafts is None,
        "accepted tokens": aggregate.accepted is None,
        "rates by position": not aggregate.accepted_at,
        "how long drafts were": bool(aggregate.accepted_at) and not aggregate.proposed_at,
        "output tokens": aggregate.emitted is None,
        "the batch": aggregate.running is None,
        "KV usage": aggregate.kv_usage is None,
    }
    return ["trees, tokens, probabilities and coins", *(name for name, lacking in lacks.items() if lacking)]


def missing_text(aggregate: Aggregate) -> str:
    """`vLLM /metrics reports counts per interval. Not available: trees, ..., output tokens`."""
    of = "request" if aggregate.is_request else "interval"
    what = "averages" if aggregate.drafts is None and aggregate.drafted is None else "counts"
    return f"{aggregate.source} reports {what} per {of}. Not available: {', '.join(missing(aggregate))}"
