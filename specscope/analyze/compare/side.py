"""A side of a comparison: the decode steps of its captures as one set of columns, those of a request together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import joined as gathered
from specscope.analyze.evidence.arrays import lengths, numbers, padded, widths, words
from specscope.analyze.evidence.columns import KINDS, PRECEDED, Columns
from specscope.analyze.evidence.visits import Visit, visits
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.loops import in_loops, step_sums
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.records import FinalKind, RequestInfo, RequestStep, RunInfo
from specscope.trace.record.tree import Bools, Doubles
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.run.packed import Picked

Longs = NDArray[np.int64]
OTHERS = "other requests"  # MethodNotes.match_source


@dataclass
class SideRequest:
    """A request of a side, and where its decode steps are."""

    id: str
    info: RequestInfo | None
    preempted: int | None  # how many times; None where the capture does not tell
    whole: bool  # False: some of its steps are not in the capture
    first: int  # its first decode step
    count: int
    capture: int = 0  # its place in Side.captures


@dataclass
class Capture:
    """A file of a side."""

    source: str
    run: RunInfo | None
    warnings: list[str] = field(default_factory=list)
    engine_steps: int = 0
    prefills: int = 0  # requests' steps that fed tokens of a prompt


def _of_steps(name: str) -> cached_property[Longs]:
    """[S] a number of RequestStep, gathered when it is first asked for."""
    return cached_property(lambda side: numbers(side.columns.picked, "", name).astype(np.int64))


@dataclass
class Side:
    """All captures of one side, with S decode steps."""

    captures: list[Capture]
    requests: list[SideRequest]
    vocabulary: Vocabulary
    picked: list[Picked]  # the decode steps
    request: Longs  # [S] the place of its request
    step: Longs  # [S] the engine's
    batch: Longs  # [S] requests in the engine's step
    preceded: Longs  # [S] what came before, as its place in PRECEDED

    index = _of_steps("index")  # the request's own step number
    context = _of_steps("context_len")
    prefill = _of_steps("prefill_tokens")
    emitted = _of_steps("emitted")

    def __len__(self) -> int:
        return len(self.request)

    def __getstate__(self) -> dict[str, object]:
        """Without what is computed from it."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    @cached_property
    def columns(self) -> Columns:
        """The decode steps."""
        return Columns([each.steps[row] for each in self.picked for row in each.rows.tolist()])

    @property
    def runs(self) -> list[RunInfo]:
        """The headers of its captures, where they have one."""
        return [capture.run for capture in self.captures if capture.run is not None]

    @property
    def tells_tokens(self) -> bool:
        """Whether all of its runs were recorded with their token ids."""
        return all(run.tells_tokens for run in self.runs)

    def dtype(self, request: SideRequest) -> str:
        """Of the target that ran it, "" where it is not known."""
        run = self.captures[request.capture].run
        return "" if run is None else run.dtype

    def rows(self, request: SideRequest) -> slice:
        """The decode steps of a request."""
        return slice(request.first, request.first + request.count)

    def steps(self, request: SideRequest) -> list[RequestStep]:
        """The same as records."""
        return self.columns.parts[self.rows(request)]

    @cached_property
    def begins(self) -> Longs:
        """[S + 1] output tokens of the side before each step, and all of them."""
        return np.concatenate([[0], np.cumsum(self.emitted)]).astype(np.int64)

    @cached_property
    def place(self) -> Longs:
        """[S] output tokens of the request before each step."""
        firsts = np.array([request.first for request in self.requests], np.int64)
        return self.begins[:-1] - self.begins[firsts[self.request]]

    def tokens(self, request: SideRequest) -> Longs:
        """The output of a request."""
        return self.columns.output[self.begins[request.first] : self.begins[request.first + request.count]]

    # [S]

    @cached_property
    def drafts(self) -> Bools:
        """Whether anything was drafted."""
        return np.diff(self.columns.start) > 0

    @cached_property
    def forced(self) -> Bools:
        """Whether an outcome or the final token was forced."""
        return lengths(self.columns.picked, "verdict", "forced") > 0

    @cached_property
    def rules(self) -> list[str]:
        """Of verification."""
        return words(self.columns.picked, "verdict", "rule")

    @cached_property
    def varies(self) -> Bools:
        """Whether costs, load or other requests decide what is drafted as well as the context.

        An adaptive tree has the size that pays at the time; a text and a model together are ranked by what was accepted
        so far; a shared suffix tree holds what other requests generated before: then all steps that use it vary.
        """
        picked = self.columns.picked
        drafters = words(picked, "", "drafter")
        shared = [OTHERS in (source or "") for source in words(picked, "method", "match_source")]
        if any(text_part(name) == "suffix" for name, yes in zip(drafters, shared, strict=True) if yes):
            shared = [yes or text_part(name) == "suffix" for name, yes in zip(drafters, shared, strict=True)]
        both = [text_part(name) != "" and model_part(name) != "" for name in drafters]
        sized = np.array(words(picked, "", "sizing"), np.bool_)
        return np.asarray(sized | np.array(both, np.bool_) | np.array(shared, np.bool_))

    @cached_property
    def final_whole(self) -> Doubles:
        """The final token's probability in the target's whole p, before any rejection; NaN where it is not known."""
        c = self.columns
        return np.where(c.parents.there, c.parents.final_p, np.where(c.kind == RECOVERED, np.nan, c.final_p))

    @cached_property
    def final_gap(self) -> Doubles:
        """Where it was drawn, the target's raw first less its raw second probability; NaN where not recorded."""
        return self.columns.parents.of_rows(self.columns.parents.gap, self.columns.final_row)

    @cached_property
    def looped(self) -> Longs:
        """How many of its output tokens lie in loops."""
        begins = (np.diff(self.request, prepend=-1) != 0) | (np.diff(self.index, prepend=0) > 1)
        return step_sums(in_loops(self.columns.output, np.repeat(np.cumsum(begins), self.emitted)), self.emitted)

    # [N]

    @cached_property
    def gap(self) -> Doubles:
        """The target's raw first less its raw second probability at the node's parent; NaN where not recorded."""
        return self.columns.parents.of_rows(self.columns.parents.gap, self.columns.row)

    @cached_property
    def raw_p(self) -> Doubles:
        """The target's probability before temperature and rules; NaN where it is not recorded."""
        return np.where(np.isnan(self.gap), np.nan, self.columns.parents.raw_p)

    @cached_property
    def draw_margin(self) -> Doubles:
        """How near the drafter's draw was to another token; 1 where the node is no draw, NaN where not recorded."""
        margin = self.columns.draw_margin
        return np.where(np.isnan(margin) & ~self.columns.sampled, 1.0, margin)

    # Rows of the target's features that the drafter's first pass was fed, where they are recorded

    @cached_property
    def fed_step(self) -> Longs:
        """[F] the step of each."""
        return np.repeat(np.arange(len(self)), self._fed)

    @cached_property
    def fed_position(self) -> Longs:
        """[F] its position."""
        picked = self.columns.picked
        known = np.repeat(self._fed > 0, lengths(picked, "notes", "fed_position"))
        return gathered(picked, "notes", "fed_position", np.int64)[known]

    @cached_property
    def fed_norms(self) -> Doubles:
        """[F, layers] the norms of its features; NaN where a step has fewer layers."""
        picked = self.columns.picked
        return padded(picked, "notes", "fed_norms", np.float64, np.nan)[widths(picked, "notes", "fed_norms") > 0]

    @cached_property
    def _fed(self) -> Longs:
        picked = self.columns.picked
        counts = lengths(picked, "notes", "fed_position")
        return np.where(lengths(picked, "notes", "fed_norms") > 0, counts, 0)

    @cached_property
    def has_coins(self) -> bool:
        """Whether the coins are recorded: a recorded coin is never 0."""
        c = self.columns
        return bool((c.coin[c.tried] if c.tried.any() else c.final_coin).any())

    @cached_property
    def has_p(self) -> bool:
        """Whether the target's probabilities are recorded: that of a final token is never 0."""
        return bool(self.columns.final_p.any())


RECOVERED = KINDS.index(FinalKind.RECOVERED)


def from_history(history: History, source: str, warnings: Iterable[str] = ()) -> Side:
    """A history as a side, along its current branch."""
    visited: dict[str, list[Visit]] = {name: [] for name in history.requests}
    for visit in visits(history):
        visited[visit.request.id].append(visit)
    capture = Capture(source, history.run, list(warnings), len(history.steps))
    capture.prefills = sum(visit.part.prefill_tokens > 0 for mine in visited.values() for visit in mine)
    in_part = any(record.absent is not None for record in history.steps)
    requests: list[SideRequest] = []
    judged: list[Visit] = []
    for request in history.requests.values():
        mine = visited[request.id]
        preempted = len(request.preemptions) if history.tells_preempted else None
        whole = not in_part or _is_whole(request, mine)
        decoded = [visit for visit in mine if visit.part.is_judged]
        requests.append(SideRequest(request.id, request.info, preempted, whole, len(judged), len(decoded)))
        judged += decoded
    around = [(visit.record.step, visit.record.batch, PRECEDED.index(visit.preceded)) for visit in judged]
    step, batch, preceded = np.array(around, np.int64).reshape(-1, 3).T
    place = np.repeat(np.arange(len(requests)), [request.count for request in requests])
    picked = Picked.of([visit.part for visit in judged])
    return Side([capture], requests, history.vocabulary, picked, place, step, batch, preceded)


def _is_whole(request: RequestHistory, steps: Sequence[Visit]) -> bool:
    """Whether all steps of a request are there, as far as is known; also where there are none but its figures."""
    told = request.end is None or len(request.end.output) == sum(visit.part.emitted for visit in steps)
    return not steps or (told and [visit.part.index for visit in steps] == list(range(len(steps))))


def joined(sides: Sequence[Side]) -> Side:
    """Several captures as one side."""
    if len(sides) == 1:
        return sides[0]
    captures: list[Capture] = []
    requests: list[SideRequest] = []
    vocabulary, places, steps = Vocabulary(), [], 0
    for side in sides:
        places.append(side.request + len(requests))
        requests += [
            dataclasses.replace(each, first=each.first + steps, capture=len(captures)) for each in side.requests
        ]
        captures += side.captures
        steps += len(side)
        vocabulary.pieces.update(side.vocabulary.pieces)
        vocabulary.special.update(side.vocabulary.special)
    picked = [each for side in sides for each in side.picked]
    around = (np.concatenate([getattr(side, name) for side in sides]) for name in ("step", "batch", "preceded"))
    return Side(captures, requests, vocabulary, picked, np.concatenate(places), *around)
