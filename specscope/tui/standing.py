"""The screen's position in a run: what its keys move, and dialogs and other screens read and change. No widgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specscope.debug.answers import BreakpointHit
from specscope.debug.viewer import Viewer
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.record.records import FinalKind
from specscope.tui.text import clean

KEPT = 2000  # most lines kept


@dataclass
class Talk:
    """The debugger's log, what was typed and what was answered; outlives the screen."""

    said: list[tuple[bool, str]] = field(default_factory=list)  # (whether it was typed, a line)
    typed: list[str] = field(default_factory=list)

    def add(self, text: str, *, typed: bool = False) -> list[tuple[bool, str]]:
        new = [(typed, clean(line)) for line in text.splitlines()]
        self.said = [*self.said, *new][-KEPT:]
        return new


@dataclass
class Pending:
    """Prompts that wait to be seen in a record, and requests whose end does: a paused engine's next step tells.

    The engine takes prompts in order: each request that comes is the oldest of them.
    """

    prompts: list[str] = field(default_factory=list)
    cancels: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)  # requests that were there before the first of the prompts

    def submit(self, prompt: str, history: History) -> None:
        if not self.prompts:
            self._known = set(history.requests)
        self.prompts.append(prompt)

    def refused(self) -> None:
        del self.prompts[:1]

    def update(self, history: History) -> None:
        """Drop what the records now show."""
        if self.cancels:
            going = {name for name, request in history.requests.items() if request.end is None}
            self.cancels &= going
        if self.prompts:
            del self.prompts[: len(history.requests.keys() - self._known)]
            self._known.update(history.requests)

    @property
    def shown(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """The pending prompts and cancels as a value, for panels to compare."""
        return tuple(self.prompts), frozenset(self.cancels)


@dataclass
class Standing:
    """The viewer, and what was chosen by hand."""

    viewer: Viewer
    show: Callable[[], None]  # draws everything as it stands now
    say: Callable[[str], None]  # a notice
    names: Callable[[], Sequence[str]]  # the requests, as they are listed
    reference: str = ""  # the file that is shown, "" for a live engine
    current: str | None = None  # the request whose tree and text are shown
    picked: bool = False  # whether it was picked by hand
    pooled: bool = True  # figures over all requests, or over the current one
    playing: bool = False  # a replay that moves by itself
    hit: BreakpointHit | None = None  # the breakpoint hit that stopped the run last
    talk: Talk = field(default_factory=Talk)
    pending: Pending = field(default_factory=Pending)

    @property
    def history(self) -> History:
        return self.viewer.history

    def request(self) -> RequestHistory | None:
        """The current request; where there is none, None and a notice."""
        request = self.history.requests.get(self.current or "")
        if request is None:
            self.say("there is no current request")
        return request

    def goto(self, position: int) -> None:
        self.playing = False
        self.viewer.goto(position)
        self.show()

    def pick(self, name: str) -> None:
        self.current, self.picked = name, True
        self.show()

    def settle(self) -> None:
        """Keep to the request picked by hand; else the first in the batch of the position."""
        history, position = self.history, self.viewer.position
        if self.picked and self.current in history.requests:
            return
        batch = history.steps[position].requests if 0 <= position < len(history.steps) else ()
        if batch:
            self.current = batch[0].request
        elif self.current not in history.requests:
            self.current = next(iter(history.requests), None)

    def action_forward(self) -> None:
        self.playing = False
        before = self.viewer.position
        self.viewer.forward()
        if self.viewer.position == before and not self.viewer.live:
            self.say("this is the last step")
        self.show()

    def action_backward(self) -> None:
        if self.viewer.position <= 0:
            self.say("this is the first step")
        self.goto(self.viewer.position - 1)

    def action_jump(self, way: int) -> None:
        self.goto(self.viewer.position + way * max(1, len(self.viewer.history.steps) // 20))

    def action_first(self) -> None:
        self.goto(0)

    def action_last(self) -> None:
        self.playing = False
        self.viewer.goto_end()
        self.show()

    def action_rejection(self, way: int) -> None:
        """The next or previous step that ended in a rejection: the current request's, then the others', in a ring."""
        requests, request = self.viewer.history.requests, self.request()
        if request is None:
            return
        names = list(requests)[::way]
        here, (later, first) = names.index(request.id), ("later", "first") if way > 0 else ("earlier", "last")
        for place, name in enumerate((request.id, *names[here + 1 :], *names[: here + 1])):
            position = next(self._rejections(requests[name], way, whole=place > 0), None)
            if position is None:
                continue
            if place and (name, position) == (request.id, self.viewer.position):
                self.say("this is the only rejection of the run")
            elif place and names.index(name) > here:
                self.say(f"{request.id} has no {later} rejection: this is {name}'s {first}")
            elif place:
                self.say(f"no {later} rejection: wrapped around to {name}'s {first}")
            self.current, self.picked = name, True
            self.goto(position)
            return
        self.say("no step of this run ended in a rejection")

    def _rejections(self, request: RequestHistory, way: int, *, whole: bool = False) -> Iterator[int]:
        """Positions of its rejections, from the position on in this direction, or over its whole run."""
        place = request.count_at(self.viewer.position) - 1
        if way < 0 and place >= 0 and request.engine_steps[place] < self.viewer.position:
            place += 1  # its last step lies behind the position: that one is the first candidate
        if whole:
            place = -1 if way > 0 else len(request.steps)
        for index in range(place + 1, len(request.steps)) if way > 0 else range(place - 1, -1, -1):
            verdict = request.steps[index].verdict
            if verdict is not None and verdict.kind is FinalKind.RECOVERED:
                yield request.engine_steps[index]

    def action_choose(self, way: int) -> None:
        """The request below or above, as the list stands; or the next interval, where there are no requests."""
        if self.viewer.history.counts_only:
            self.action_forward() if way > 0 else self.action_backward()
            return
        names = self.names() or list(self.viewer.history.requests)
        if not names:
            self.say("no requests yet")
            return
        index = names.index(self.current) + way if self.current in names else 0
        self.pick(names[min(max(index, 0), len(names) - 1)])
