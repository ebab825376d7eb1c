"""What `locate` is asked: a run, the models that judge it, and whom a walk watches how far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from specscope.analyze.audit.audit import of_drafter
from specscope.analyze.audit.contexts import Contexts, contexts_of
from specscope.analyze.audit.options import Progress
from specscope.analyze.diagnose.judged import JudgedCase
from specscope.analyze.locate.located import Located
from specscope.errors import UserError
from specscope.trace.history.history import History, PlaceName
from specscope.trace.record.records import RunInfo

REQUESTS = 4  # that are watched where the models disagree, and where nothing says where to look
ROWS = 3000  # that are compared at most, unless a place is named
LITTLE = 6  # decode steps of one request, where nothing is known to be wrong


@dataclass(frozen=True)
class WalkPlan:
    """Whom a walk watches, and how far it goes."""

    contexts: Mapping[str, Contexts]  # by request
    until: int  # the place in the history of the last step to run
    first: int = 0  # and of the first one

    @property
    def texts(self) -> dict[str, list[int]]:
        """Prompt and output, by request."""
        return {name: contexts.text for name, contexts in self.contexts.items()}


@dataclass(frozen=True)
class Question:
    """What is located: a run, the models that judge, and where to look. `little`: nothing is known to be wrong."""

    session: JudgedCase
    place: PlaceName | None
    progress: Progress
    little: bool = False
    # Of sampling and verdict, as the engine had them run again: said where the evidence has no place of that side
    driven: list[Located] = field(default_factory=list)

    @property
    def run(self) -> RunInfo:
        """What ran."""
        assert self.history.run is not None
        return self.history.run

    @property
    def history(self) -> History:
        """The run."""
        return self.session.case.history

    def differing(self, *, drafter: bool) -> dict[str, int]:
        """By request, the first engine step in which target (or drafter) differs."""
        first: dict[str, int] = {}
        for finding in self.session.audited.findings:
            name = finding.name
            is_models = drafter or "raw" in name or "top" in name
            if name == "context" or of_drafter(name) != drafter or not is_models:
                continue
            for item in compress(finding.items, finding.differs):
                first[item.request] = min(first.get(item.request, item.step), item.step)
        return first

    def watched(self, *, drafter: bool) -> WalkPlan:
        """Whom to watch. Raises UserError where no text is known."""
        if self.little and self.place is None:
            names, first, until = _little(self.history, self.session.audited.doubts)
        else:
            names, first, until = self._chosen(self.differing(drafter=drafter))
        contexts = {name: known for name in names if (known := contexts_until(self.history, name, until)) is not None}
        if not contexts:
            raise UserError("no request's whole text is in the capture, so there is nothing to feed")
        return WalkPlan(contexts, until, first)

    def _chosen(self, differs: dict[str, int]) -> tuple[list[str], int, int]:
        """The requests to watch, and the places in the history of the first and the last step to run."""
        history, place = self.history, self.place
        if place is not None:
            request = history.requests[place.request]
            index = len(request.steps) - 1
            if place.index is not None:
                index = next(i for i, part in enumerate(request.steps) if part.index == place.index)
            return [place.request], 0, request.engine_steps[index]
        if differs:
            names = sorted(differs, key=lambda name: differs[name])[:REQUESTS]
            last = max(differs[name] for name in names)
            return names, 0, max(i for i, record in enumerate(history.steps) if record.step <= last)
        names, rows, until = list[str](), 0, 0
        for number, record in enumerate(history.steps):
            until = number
            rows += sum(part.prefill_tokens + 1 + len(part.tree) for part in record.requests)
            names += [part.request for part in record.requests if part.request not in names]
            if rows > ROWS:
                break
        return names[:REQUESTS], 0, until


def _little(history: History, doubts: Mapping[tuple[str, int], int]) -> tuple[list[str], int, int]:
    """Some steps of a request, likewise: where most figures need much of what rounding explains, then with the most
    drafts, the most rules, a short prompt."""

    def rank(name: str, steps: Sequence[int]) -> tuple[int, ...]:
        request = history.requests[name]
        assert request.info is not None
        params, parts = request.info.params, [request.steps[i] for i in steps]
        cuts = [params.top_k > 0, params.top_p < 1, params.min_p > 0, params.temperature != 1, params.penalised]
        rules = sum((not params.greedy, *cuts, params.limited, bool(params.logit_bias)))
        doubtful = sum(doubts.get((name, part.index), 0) for part in parts)
        return -doubtful, -sum(len(part.tree) > 0 for part in parts), -rules, len(request.info.prompt_tokens)

    windows = list[tuple[str, list[int]]]()
    for name, each in history.requests.items():
        if each.info and each.steps and not each.steps[0].index:
            decoded = [i for i, part in enumerate(each.steps) if part.verdict is not None]
            begins = [n for n, i in enumerate(decoded) if not n or (name, each.steps[i].index) in doubts]
            windows += [(name, decoded[n : n + LITTLE]) for n in begins]
    if not windows:
        return [], 0, 0
    name, steps = min(windows, key=lambda window: rank(*window))
    request = history.requests[name]
    is_first = all(part.verdict is None for part in request.steps[: steps[0]])
    return [name], request.engine_steps[0 if is_first else steps[0]], request.engine_steps[steps[-1]]


def contexts_until(history: History, name: str, until: int) -> Contexts | None:
    """A request's contexts in the steps up to a place of the history; its text no longer than these need."""
    request = history.requests[name]
    steps = zip(request.engine_steps, request.steps, strict=True)
    places = [i for i, (step, part) in enumerate(steps) if step <= until and part.verdict is not None]
    whole = contexts_of(history, name, places)
    if whole is None or not whole.steps:
        return None
    return whole.of(whole.steps, max(step.part.position + len(step.verdict.path) + 2 for step in whole.steps))
