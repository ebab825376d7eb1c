"""Look: what the screen shows. Made anew for each refresh; panels read only this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specscope.debug.viewer import Viewer
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.interval import counts
from specscope.trace.history.place import why
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import Undrafted
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import Origin, RequestStep, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.text import clean


@dataclass
class Look:
    """One moment of a session, with the current request and position."""

    viewer: Viewer
    current: str | None = None  # the request whose tree and text are shown
    pooled: bool = True  # figures over all requests, or over the current one
    dark: bool = True
    title: str = ""
    playing: bool = False  # a replay that moves by itself
    lost: str = ""  # why the engine can no longer be heard
    pending: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())  # prompts and cancels that wait for a step

    def __post_init__(self) -> None:
        self.position = self.viewer.position
        self.steps = len(self.history.steps)

    @property
    def history(self) -> History:
        return self.viewer.history

    @property
    def vocabulary(self) -> Vocabulary:
        return self.history.vocabulary

    @cached_property
    def record(self) -> StepRecord | None:
        return self.history.steps[self.position] if 0 <= self.position < self.steps else None

    @cached_property
    def request(self) -> RequestHistory | None:
        return self.history.requests.get(self.current) if self.current is not None else None

    @cached_property
    def part(self) -> tuple[int, RequestStep] | None:
        """The current request's step at the position: (its place among the request's steps, the step)."""
        return self.history.part(self.current, self.position) if self.current is not None else None

    @property
    def aggregate(self) -> Aggregate | None:
        """The interval at the position, where the engine reports counts and no steps."""
        return self.record.aggregate if self.record is not None and self.history.counts_only else None

    def why(self, step: RequestStep, node: int) -> list[str]:
        """Why a node of the current request's step was kept or not, a sentence each."""
        running = self.viewer.live and not self.viewer.paused  # then what is usual changes with every step
        return [*why(self.history, step, node), *(() if running else self.viewer.typical(step, node))]

    @property
    def counts(self) -> Acceptance:
        if self.aggregate is not None and not self.pooled:
            return counts(self.aggregate)
        return self.history.acceptance_at(self.position, self.scope)

    @property
    def undrafted(self) -> Counter[Undrafted]:
        return self.history.undrafted_at(self.position, self.scope)

    @property
    def absence(self) -> str:
        """Why there is no `part`."""
        if self.aggregate is not None:
            return f"no trees or requests: {clean(self.aggregate.source)} reports only sums"
        if self.current is None:
            return "no steps yet" if self.viewer.live or self.viewer.reading else "no steps were recorded"
        return f"{clean(self.current)} has no step yet"

    @property
    def at(self) -> int:
        """The position in the history of the current request's step; -1 where there is none."""
        return self.request.engine_steps[self.part[0]] if self.request is not None and self.part is not None else -1

    @property
    def asks(self) -> bool:
        """Whether there is an engine that takes commands: live, and not one that is only received from."""
        return self.viewer.engine is not None

    @property
    def scope(self) -> str | None:
        """The request that the figures are about, None for all."""
        return None if self.pooled else self.current

    @property
    def scope_name(self) -> str:
        if self.aggregate is not None:
            return "all intervals" if self.pooled else "this interval"
        return "all requests" if self.pooled else (self.current or "no request")

    def output(self) -> list[tuple[int, Origin]]:
        return self.request.output(self.part[0] + 1) if self.request is not None and self.part is not None else []

    @property
    def status(self) -> str:
        """`reading`, `replay`, `playing`, or the state of the engine."""
        control = self.viewer.control
        if self.viewer.reading:
            return "reading"
        if control is None:
            return "playing" if self.playing else "replay"
        if control.status == "ended" and self.playing:
            return "playing"
        return control.status

    @property
    def log(self) -> Sequence[str]:
        return () if self.viewer.control is None else self.viewer.control.log

    @property
    def error(self) -> str:
        """Why the engine ended, where it ended badly."""
        control = self.viewer.control
        return self.lost or (control.error if control is not None else "")
