"""What one request cost: times and acceptance, under vLLM's names, from the request's records alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from specscope.trace.record.records import RequestStep, StepRecord

NS_MS = 1e-6


class SpeculativeDecoding(msgspec.Struct):
    """`metrics.speculative_decoding`. A step here is one with drafts; of a tree all nodes are drafts."""

    mean_acceptance_length: float  # 1 + accepted / steps
    draft_acceptance_rate: float  # accepted / drafted
    acceptance_histogram: list[int]  # [j]: steps that accepted j drafts
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the longest draft: the histogram has one place more
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class RequestMetrics(msgspec.Struct):
    """`metrics`: times in milliseconds. The first token's is counted from admission, as vLLM's is."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None  # from the first token to the last
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None  # of all tokens, prefill included
    speculative_decoding: SpeculativeDecoding | None = None


@dataclass
class RequestCounts:
    """Counts of one request, step by step."""

    arrival_ns: int = 0
    admitted_ns: int = 0
    first_ns: int = 0  # the first output
    last_ns: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)  # by step with drafts
    drafted: list[int] = field(default_factory=list)

    def add(self, part: RequestStep, record: StepRecord) -> None:
        if part.emitted:
            self.first_ns = self.first_ns or record.end_ns
            self.last_ns = record.end_ns
            self.tokens += part.emitted
        if part.verdict is not None and len(part.tree):
            self.accepted.append(part.verdict.accepted)
            self.drafted.append(len(part.tree))

    def metrics(self, level: str, longest: int, *, times: bool) -> RequestMetrics | None:
        """What is reported at this level of --per-request-spec-decode-metrics; `longest`: the longest draft."""
        if level == "none" and not times:
            return None
        metrics = self._times() if times else RequestMetrics()
        metrics.speculative_decoding = (
            None if level == "none" else self._speculation(longest, detailed=level == "detailed")
        )
        return metrics

    def _times(self) -> RequestMetrics:
        if not self.first_ns:
            return RequestMetrics()
        spent, whole = (self.last_ns - self.first_ns) * NS_MS, (self.last_ns - self.admitted_ns) * NS_MS
        return RequestMetrics(
            time_to_first_token_ms=(self.first_ns - self.admitted_ns) * NS_MS,
            generation_time_ms=spent,
            queue_time_ms=(self.admitted_ns - self.arrival_ns) * NS_MS,
            mean_itl_ms=spent / (self.tokens - 1) if self.tokens > 1 else None,
            tokens_per_second=self.tokens / whole * 1000 if whole > 0 else None,
        )

    def _speculation(self, longest: int, *, detailed: bool) -> SpeculativeDecoding | None:
        steps, accepted, drafted = len(self.accepted), sum(self.accepted), sum(self.drafted)
        if not steps:
            return None
        return SpeculativeDecoding(
            mean_acceptance_length=1 + accepted / steps,
            draft_acceptance_rate=accepted / drafted,
            acceptance_histogram=[self.accepted.count(n) for n in range(max(longest, *self.accepted, 0) + 1)],
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
            num_spec_tokens=longest,
            per_step_accepted=self.accepted if detailed else None,
            per_step_drafted=self.drafted if detailed else None,
        )
