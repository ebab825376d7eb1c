"""The keys that move through a run: by steps, by rejections, by requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from specscope.trace.history.history import RequestHistory
from specscope.trace.record.records import FinalKind
from specscope.tui.standing import Standing


class Moves:
    """The actions of an app that move where it stands."""

    def __init__(self, standing: Standing, names: Callable[[], Sequence[str]]) -> None:
        """`names`: the requests, as they are listed."""
        self._standing, self._names = standing, names
        self.viewer, self._say = standing.viewer, standing.say

    def action_forward(self) -> None:
        """The next step."""
        self._standing.playing = False
        before = self.viewer.position
        self.viewer.forward()
        if self.viewer.position == before and not self.viewer.live:
            self._say("this is the last step")
        self._standing.show()

    def action_backward(self) -> None:
        """The step before."""
        if self.viewer.position <= 0:
            self._say("this is the first step")
        self._standing.goto(self.viewer.position - 1)

    def action_jump(self, way: int) -> None:
        """Move by a twentieth of the run."""
        self._standing.goto(self.viewer.position + way * max(1, len(self.viewer.history.steps) // 20))

    def action_first(self) -> None:
        """The first step."""
        self._standing.goto(0)

    def action_last(self) -> None:
        """The newest step, and follow."""
        self._standing.playing = False
        self.viewer.goto_end()
        self._standing.show()

    def action_rejection(self, way: int) -> None:
        """The next or previous step that ended in a rejection: the current request's, then the others', in a ring."""
        requests, request = self.viewer.history.requests, self._standing.request()
        if request is None:
            return
        position = next(self._rejections(request, way), None)
        if position is not None:
            self._to(request.id, position)
            return
        names = list(requests)[::way]
        here = names.index(request.id)
        later, first = ("later", "first") if way > 0 else ("earlier", "last")
        for name in (*names[here + 1 :], *names[: here + 1]):
            position = next(self._rejections(requests[name], way, whole=True), None)
            if position is None:
                continue
            if (name, position) == (request.id, self.viewer.position):
                self._say("this is the only rejection of the run")
            elif names.index(name) > here:
                self._say(f"{request.id} has no {later} rejection: this is {name}'s {first}")
            else:
                self._say(f"no {later} rejection: wrapped around to {name}'s {first}")
            self._to(name, position)
            return
        self._say("no step of this run ended in a rejection")

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

    def _to(self, name: str, position: int) -> None:
        self._standing.current, self._standing.picked = name, True
        self._standing.goto(position)

    def action_choose(self, way: int) -> None:
        """The request below or above, as the list stands; or the next interval, where there are no requests."""
        if self.viewer.history.counts_only:
            self.action_forward() if way > 0 else self.action_backward()
            return
        names = self._names() or list(self.viewer.history.requests)
        if not names:
            self._say("no requests yet")
            return
        index = names.index(self._standing.current) + way if self._standing.current in names else 0
        self._standing.pick(names[min(max(index, 0), len(names) - 1)])
