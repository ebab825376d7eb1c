"""Aggregate: what an engine that tells counts, and no steps, did in an interval.

vLLM's and SGLang's metrics, vLLM's log lines and the figures of a response are such: sums over drafts, without trees,
tokens or coins. A count that the source does not tell is None, or empty; it is never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LENGTHS = ("mean acceptance length", "sglang:spec_accept_length")  # of `averages`, those that are one
DEPTH = "current speculative depth"  # of `averages`: how deep drafts were at the interval's end


@dataclass(frozen=True)
class Aggregate:
    """The counts of one interval, or of one request. Filled by watch/, and by plugins in engines that they do not know.

    Drafts are chains: `accepted_at[d-1]` of them accepted a token at depth d, `proposed_at[d-1]` were that long.
    """

    source: str  # where it comes from, in words: vLLM /metrics
    engine: str = ""  # which engine, where the source names it
    request: str = ""  # the id of the one request that it is about, "" for all of an interval
    drafts: int | None = None  # steps of requests with at least one drafted token
    drafted: int | None = None  # tokens
    accepted: int | None = None  # tokens
    emitted: int | None = None  # output tokens
    accepted_at: tuple[int, ...] = ()
    proposed_at: tuple[int, ...] = ()
    running: int | None = None  # requests, at the end of the interval
    waiting: int | None = None
    kv_usage: float | None = None  # share of the KV cache in use, 0 to 1
    averages: Mapping[str, float] = field(default_factory=dict)  # what is told as an average only, under its own name
    reset: bool = False  # a counter went back: the engine was restarted, and this counts from there
    rounded: bool = False  # counts were worked out from rounded figures, and are the nearest that fit

    @property
    def length(self) -> float | None:
        """Mean acceptance length: from the counts, else as the source tells it."""
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        told = next((self.averages[name] for name in LENGTHS if name in self.averages), None)
        return told or None  # SGLang's gauge is 0 where nothing was drafted

    @property
    def tried_at(self) -> tuple[int, ...]:
        """[d-1]: drafts in which the token at depth d was tried; empty where drafts are not all of one length."""
        if self.drafts is None or not self.proposed_at or set(self.proposed_at) != {self.drafts}:
            return ()
        return (self.drafts, *self.accepted_at[:-1])


def full_chains(drafts: int | None, drafted: int | None, depth: int) -> tuple[int, ...]:
    """`proposed_at` of drafts of at most `depth` tokens, where their sum shows that all were that long; else empty."""
    return (drafts,) * depth if drafts is not None and drafted == drafts * depth else ()
