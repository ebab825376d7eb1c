"""Where requests stand in a step's batch, and their verdicts: read already, or on their way from a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specscope.trace.record.tree import Ints
from specscope.vllm.device import Gathered
from specscope.vllm.gathered import read
from specscope.vllm.numbers import Judged, assembled


@dataclass
class BatchPlace:
    """A request's place in the batch of a step, as the host knows it."""

    name: str
    row: int  # in the sampler's batch
    context: int  # tokens whose KV was there; too many where the host runs ahead of the device
    count: int  # tokens that were fed, and `drafts` of them drafts
    drafts: int  # that were scheduled; fewer may have been verified
    ended_prompt: bool  # False for a chunk of a prompt that did not reach its end
    blocks: Ints  # of the request's KV, from number `first_block` on
    first_block: int
    ahead: bool = False  # whether the host runs ahead of the device
    match_length: int = 0  # suffix decoding: tokens of the context that were found, and went on as the drafts do


class Judgements(Protocol):
    """The verdicts of a batch."""

    @property
    def bytes(self) -> int:
        """How much is copied for them from a device."""
        ...

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        ...

    def wait(self) -> None:
        """Until they can."""
        ...

    def of(self, row: int) -> Judged | None:
        """Of the request in that row of the sampler's batch; None where there was nothing to judge."""
        ...


class OnHost:
    """Read already."""

    bytes = 0

    def __init__(self, judged: Sequence[Judged | None]) -> None:
        self.judged = list(judged)  # by row; a debugger may put another there

    def ready(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """For nothing."""

    def of(self, row: int) -> Judged | None:
        """As it was read."""
        return self.judged[row]


class OnDevice:
    """Gathered in one or more calls, each of the requests that follow those of the call before."""

    def __init__(self, calls: Sequence[Gathered]) -> None:
        self._calls = calls
        self._judged: list[Judged] | None = None

    @property
    def bytes(self) -> int:
        """How much was copied."""
        return sum(call.bytes for call in self._calls)

    def ready(self) -> bool:
        """Whether every copy has been made."""
        return all(call.ready() for call in self._calls)

    def wait(self) -> None:
        """Until they have."""
        for call in self._calls:
            call.wait()

    def of(self, row: int) -> Judged:
        """All are read with the first that is asked for."""
        if self._judged is None:
            self._judged = [assembled(numbers) for call in self._calls for numbers in read(call)]
        return self._judged[row]
