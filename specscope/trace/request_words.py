"""A request as a whole in words: the facts that `--keep` can test, each declared once; and the parser of that flag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Annotated

from msgspec import Meta

from specscope.errors import UserError
from specscope.trace.checked import checked
from specscope.trace.history.expressions import Expression
from specscope.trace.history.history import RequestHistory
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.history.wording import ending
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RequestStep
from specscope.trace.record.trace_sampling import BUFFER_MIB, TraceSampling
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import WordField

PROMPT_CHARS = 400  # of a list
Share = Annotated[float, Meta(ge=0, le=1, description="between 0 and 1, such as 0.01")]
Mib = Annotated[float, Meta(ge=1, le=2**20, description="between 1 and 1,048,576 (MiB)")]


@dataclass(frozen=True)
class RequestRow:
    """A line of a list of requests: what one had come to."""

    name: str
    state: str  # as RequestHistory.state_at has it, in words
    tokens: int
    steps: int
    tau: float | None
    kind: str  # its label of that name
    prompt: str  # on one line: its title, where it has one


def request_row(request: RequestHistory, position: int, vocabulary: Vocabulary) -> RequestRow:
    """A request as it stood at a position in History.steps."""
    info, count, state = request.info, request.count_at(position), request.state_at(position)
    prompt = "" if info is None else (info.title or info.prompt)[:PROMPT_CHARS]
    if info is not None and not prompt:
        prompt = vocabulary.text(info.prompt_tokens[: PROMPT_CHARS // 4].tolist())
    kind = "" if info is None else str(info.labels.get("kind", ""))
    tokens, tau = request.totals.emitted[count], request.tau_at(position)
    if request.sums is not None and state not in ("later", "prefill"):
        tokens, count = request.sums.emitted, request.sums.steps
    return RequestRow(request.id, ending(state), tokens, count, tau, kind, " ".join(prompt.split()))


@dataclass(frozen=True)
class RequestFacts:
    """A request as a whole, as far as it is known. Its fields: REQUEST."""

    name: str
    info: RequestInfo | None
    parts: Sequence[tuple[RequestStep, int]]  # its part in each engine step, and when that step ended
    preempted: int
    end: RequestEnd | None  # None while it runs

    @cached_property
    def sums(self) -> Acceptance:
        """The sums over all of its steps."""
        return measure(part for part, _ in self.parts)

    @cached_property
    def judged(self) -> list[RequestStep]:
        """Its steps except prefill chunks."""
        return [part for part, _ in self.parts if part.verdict is not None]

    @property
    def asked(self) -> RequestInfo | None:
        """The RequestInfo, from its admission or its end; None where neither is known."""
        return self.info or (None if self.end is None else self.end.info)

    def since(self, moment_ns: int) -> float:
        """Milliseconds from its arrival; NaN where either is not known."""
        return nan if self.asked is None or not moment_ns else (moment_ns - self.asked.arrival_ns) / 1e6

    def values(self) -> dict[str, object]:
        """All fields.

        An unknown number is NaN, with which no comparison holds: in `tau < 1.5 or error` a request that failed before
        anything was drafted still is an error.
        """
        return {name: nan if (value := field.value(self)) is None else value for name, field in REQUEST.items()}


def _reason(facts: RequestFacts) -> str:
    return "" if facts.end is None else facts.end.reason.value


def _last_ns(facts: RequestFacts) -> int:
    return facts.end.finished_ns if facts.end is not None else facts.parts[-1][1] if facts.parts else 0


# Where a step has a field of the same name, this is the request's sum.
REQUEST: dict[str, WordField] = {
    "request": WordField(str, "the request's id", lambda r: r.name),
    "tau": WordField(float, "mean acceptance length; unknown if nothing was drafted", lambda r: r.sums.tau),
    "rate": WordField(
        float,
        "draft acceptance rate: accepted / drafted nodes; unknown if nothing was drafted",
        lambda r: r.sums.rate,
    ),
    "drafts": WordField(int, "steps with at least one drafted token", lambda r: r.sums.drafts),
    "nodes": WordField(int, "nodes drafted", lambda r: r.sums.drafted),
    "accepted": WordField(int, "nodes accepted", lambda r: r.sums.accepted),
    "emitted": WordField(int, "output tokens", lambda r: r.sums.emitted if r.end is None else len(r.end.output)),
    "steps": WordField(int, "engine steps in which it took part", lambda r: len(r.parts)),
    "prompt": WordField(int, "tokens of the prompt", lambda r: 0 if r.asked is None else len(r.asked.prompt_tokens)),
    "error": WordField(bool, "whether it failed", lambda r: _reason(r) == FinishReason.ERROR),
    "cancelled": WordField(bool, "whether it was cancelled", lambda r: _reason(r) == FinishReason.CANCELLED),
    "reason": WordField(str, "why it ended: eos, stop, length, cancelled or error", _reason),
    "ms": WordField(float, "milliseconds from its arrival to its end", lambda r: r.since(_last_ns(r))),
    "queue_ms": WordField(
        float,
        "milliseconds that it waited for admission",
        lambda r: r.since(0 if r.asked is None else r.asked.admitted_ns),
    ),
    "ttft_ms": WordField(
        float,
        "milliseconds to its first output token; unknown if there was none",
        lambda r: r.since(next((end_ns for part, end_ns in r.parts if part.emitted and end_ns), 0)),
    ),
    "preempted": WordField(int, "times that it lost its KV", lambda r: r.preempted),
    "forced": WordField(
        bool,
        "whether a verdict was forced",
        lambda r: any(part.verdict is not None and len(part.verdict.forced) for part in r.judged),
    ),
    "rule": WordField(
        str, "the rule of verification of its last step", lambda r: r.judged[-1].rule if r.judged else ""
    ),
    "labels": WordField(
        tuple,
        'its labels, as in "kind=code" in labels',
        lambda r: () if r.asked is None else tuple(f"{key}={value}" for key, value in r.asked.labels.items()),
    ),
}


def read_sampling(
    ratio: float | str | None,
    keep: str | None,
    buffer_mib: float | str | None = None,
    *,
    captures: bool = False,
    names: tuple[str, str, str] = ("--sample", "--keep", "--keep-buffer"),
) -> TraceSampling:
    """Read trace sampling from flags or variables called `names`. Raises UserError that says what is possible."""
    share = None if ratio is None else checked(_number(ratio), Share, names[0])
    size = BUFFER_MIB if buffer_mib is None else checked(_number(buffer_mib), Mib, names[2])
    condition = None
    if keep is not None:
        if not keep.strip():
            raise UserError(f"{names[1]}: give a condition, such as tau < 1.5 or error")
        try:
            condition = Expression(keep, {name: field.type for name, field in REQUEST.items()})
        except UserError as error:
            raise UserError(f"{names[1]}: {error}") from None
    elif buffer_mib is not None:
        raise UserError(f"{names[2]} needs {names[1]}: without a condition nothing is held")
    return TraceSampling(share, condition, int(size * 2**20), captures)


def _number(value: float | str) -> float | str:
    """A flag's or variable's text as a number, where it is one: not nan, 1_000 or other digits, which float takes."""
    is_number = isinstance(value, str) and re.fullmatch(r"([0-9]{1,40}\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", value)
    return float(value) if is_number else value
