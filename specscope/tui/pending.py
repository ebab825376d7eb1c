"""Pending: what an engine was asked for and has not done yet. A paused one does it with its next step."""

from __future__ import annotations

from dataclasses import dataclass, field

from specscope.trace.history.history import History
from specscope.trace.record.records import RequestInfo


@dataclass
class Pending:
    """Prompts that wait to be seen in a record, and requests whose end does."""

    prompts: list[str] = field(default_factory=list)
    cancels: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)  # requests that were there before the first of the prompts

    def submit(self, prompt: str, history: History) -> None:
        """A prompt was sent."""
        if not self.prompts:
            self._known = set(history.requests)
        self.prompts.append(prompt)

    def refused(self) -> None:
        """The engine refused a prompt: the oldest, for it takes them in order."""
        if self.prompts:
            self.prompts.pop(0)

    def update(self, history: History) -> None:
        """Let go of what the records show."""
        if self.cancels:
            going = {name for name, request in history.requests.items() if request.end is None}
            self.cancels &= going
        if not self.prompts:
            return
        for name in [name for name in history.requests if name not in self._known]:
            self._known.add(name)
            self._came(history.requests[name].info)

    def _came(self, info: RequestInfo | None) -> None:
        """A request came: one of these prompts, or where its text is not known the oldest of them."""
        told = info is not None and bool(info.prompt or info.title)
        for at, prompt in enumerate(self.prompts):
            if not told or (info is not None and (prompt == info.title or prompt in info.prompt)):
                del self.prompts[at]
                return

    @property
    def shown(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """As a value, for panels to compare."""
        return tuple(self.prompts), frozenset(self.cancels)
