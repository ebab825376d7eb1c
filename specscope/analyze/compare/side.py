"""A side of a comparison: the decode steps of its captures as one set of columns, those of a request together.

Large captures are read in processes of their own, one for each processor.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import doubles, flags, indices, lengths, numbers, padded, widths, words
from specscope.analyze.evidence.arrays import joined as gathered
from specscope.analyze.evidence.columns import KINDS, PRECEDED, Columns
from specscope.analyze.evidence.visits import Visit, visits
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.lifetime import end_with_parent
from specscope.plans.kinds import model_part, text_part
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, RequestInfo, RequestStep, RunInfo
from specscope.trace.record.tree import Bools, Doubles
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture

Longs = NDArray[np.int64]
Hashes = NDArray[np.uint64]
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
OTHERS = "other requests"  # MethodNotes.match_source
LARGE = 16 * 2**20  # bytes: a smaller file is read sooner than a process starts
MANY = 4096  # steps: from there on, columns that wait for the next that asks for them are most of the memory
Progress = Callable[[float], None]
RECOVERED = KINDS.index(FinalKind.RECOVERED)


def mix(values: NDArray[np.integer]) -> Hashes:
    """Numbers hashed to well spread 64-bit ones (splitmix64)."""
    x = values.astype(np.uint64) + _ODD[0]
    x = (x ^ (x >> np.uint64(30))) * _ODD[1]
    x = (x ^ (x >> np.uint64(27))) * _ODD[2]
    return x ^ (x >> np.uint64(31))


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

    @property
    def params(self) -> SamplingParams | None:
        """None where they are not known."""
        return None if self.info is None else self.info.params

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance, as far as is known."""
        return self.params is None or self.params.greedy

    @property
    def heat(self) -> float:
        """How much the temperature magnifies a change of the logits; 1 from temperature 1 on."""
        p = self.params
        return 1.0 if p is None or p.greedy else max(1.0, 1 / p.temperature)

    @property
    def cut(self) -> bool:
        """Whether top-k, top-p or min-p cut the target's distribution: at the edge, rounding decides what stays."""
        p = self.params
        return p is not None and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


@dataclass
class Capture:
    source: str
    run: RunInfo | None
    warnings: list[str] = field(default_factory=list)
    engine_steps: int = 0
    prefills: int = 0


@dataclass
class Side:
    """All captures of one side, with S decode steps."""

    captures: list[Capture]
    requests: list[SideRequest]
    vocabulary: Vocabulary
    columns: Columns  # of the decode steps
    step: Longs  # [S] the engine's
    batch: Longs  # [S] requests in the engine's step
    preceded: Longs  # [S] what came before, as its place in PRECEDED

    # [S] its request's place; the request's own step number, the tokens of its context that were cached and those that
    # it fed, and its output tokens; output tokens of the side before the request, and of the request before the step
    request = indices(lambda side: np.repeat(np.arange(len(side.requests)), [each.count for each in side.requests]))
    index = indices(lambda side: numbers(side.columns.picked, "", "index"))
    context = indices(lambda side: numbers(side.columns.picked, "", "context_len"))
    prefill = indices(lambda side: numbers(side.columns.picked, "", "prefill_tokens"))
    emitted = indices(lambda side: numbers(side.columns.picked, "", "emitted").astype(np.int64))
    earlier = indices(lambda side: side.begins[np.array([one.first for one in side.requests])[side.request]])
    place = indices(lambda side: side.begins[:-1] - side.earlier)
    heat = doubles(lambda side: np.array([each.heat for each in side.requests])[side.request])  # [S] of its request
    cut = flags(lambda side: np.array([each.cut for each in side.requests], np.bool_)[side.request])
    # [S + 1] output tokens of the side before each step, and all of them
    begins = indices(lambda side: np.concatenate([[0], np.cumsum(side.emitted)]).astype(np.int64))
    # [S] whether anything was drafted; whether an outcome or the final token was forced
    drafts = flags(lambda side: np.diff(side.columns.start) > 0)
    forced = flags(lambda side: lengths(side.columns.picked, "verdict", "forced") > 0)
    # Where target and drafter were asked, the target's raw first less its raw second probability: [S] for the final
    # token, [N] for the node. NaN where not recorded
    final_gap = doubles(lambda side: side.columns.parents.of_rows(side.columns.parents.gap, side.columns.final_row))
    gap = doubles(lambda side: side.columns.parents.of_rows(side.columns.parents.gap, side.columns.row))
    drawn = indices(lambda side: np.flatnonzero(~np.isnan(side.final_whole) & ~side.forced))  # steps with final_whole
    # [N] the target's probability before temperature and rules; how near the drafter's draw was to another token, 1
    # where the node is no draw. NaN where it is not recorded
    raw_p = doubles(lambda side: np.where(np.isnan(side.gap), np.nan, side.columns.parents.raw_p))
    draw_margin = doubles(lambda side: np.where(side.columns.no_draw, 1.0, side.columns.draw_margin))
    # Whether all of its runs were recorded with their token ids; whether coins and p are: a final p is never 0
    tells_tokens = cached_property[bool](lambda side: all(run.tells_tokens for run in side.runs))
    has_coins = cached_property[bool](lambda side: side.columns.has_coins)
    has_p = cached_property[bool](lambda side: bool(side.columns.final_p.any()))
    # Requests' steps that fed tokens of a prompt; the headers of its captures, where they have one
    prefills = cached_property[int](lambda side: sum(capture.prefills for capture in side.captures))
    runs = cached_property[list[RunInfo]](lambda side: [each.run for each in side.captures if each.run is not None])

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def preemptions(self) -> int | None:
        """Of all requests; None where a capture does not tell."""
        told = [request.preempted for request in self.requests]
        return None if None in told else sum(filter(None, told))

    def dtype(self, request: SideRequest) -> str:
        """Of the target that ran it, "" where it is not known."""
        run = self.captures[request.capture].run
        return "" if run is None else run.dtype

    def rows(self, request: SideRequest) -> slice:
        return slice(request.first, request.first + request.count)

    def steps(self, request: SideRequest) -> Sequence[RequestStep]:
        return self.columns.parts[self.rows(request)]

    def output(self, request: SideRequest) -> slice:
        """Where the output of a request is among all of the side."""
        return slice(int(self.begins[request.first]), int(self.begins[request.first + request.count]))

    def tokens(self, request: SideRequest) -> Longs:
        return self.columns.output[self.output(request)]

    def forget(self) -> None:
        """Let go of the columns that were computed, of a side of many steps: they are computed again when asked for."""
        for table in (self, self.columns) if len(self) > MANY else ():
            for name in vars(table).keys() - {"picked", *table.__dataclass_fields__}:
                del vars(table)[name]

    @cached_property
    def varies(self) -> Bools:
        """[S] whether costs, load or other requests decide what is drafted as well as the context.

        An adaptive tree has the size that pays at the time; a text and a model together are ranked by what was accepted
        so far; a shared suffix tree holds what other requests generated before: then all steps that use it vary.
        """
        picked = self.columns.picked
        texts = [(text_part(name), model_part(name)) for name in words(picked, "", "drafter")]
        shared = np.array([OTHERS in (source or "") for source in words(picked, "method", "match_source")], np.bool_)
        both = np.array([all(parts) or (parts[0] == "suffix" and shared.any()) for parts in texts], np.bool_)
        return np.asarray(np.array(words(picked, "", "sizing"), np.bool_) | both | shared)

    @cached_property
    def final_whole(self) -> Doubles:
        """[S] the final token's probability in the target's whole p, before any rejection; NaN where not known."""
        c = self.columns
        return np.where(c.parents.there, c.parents.final_p, np.where(c.kind == RECOVERED, np.nan, c.final_p))

    @cached_property
    def tree(self) -> Hashes:
        """[S] a hash of the tokens and the shape of its tree, in draw order."""
        c = self.columns
        each = mix((c.token << 20) ^ ((c.parent + 1) << 9) ^ c.node)
        out = np.zeros(len(self), np.uint64)
        np.add.at(out, c.step, each * (mix(c.node) | np.uint64(1)))
        return out

    @cached_property
    def fed(self) -> tuple[Longs, Longs, Doubles]:
        """Of the F rows of the target's features that a drafter's first pass was fed, where they are recorded.

        [F] the step and the position of each, and [F, layers] its norms; NaN where a step has fewer layers.
        """
        picked = self.columns.picked
        counts, known = (lengths(picked, "notes", name) for name in ("fed_position", "fed_norms"))
        rows = np.where(known > 0, counts, 0)
        position = gathered(picked, "notes", "fed_position", np.int64)[np.repeat(rows > 0, counts)]
        norms = padded(picked, "notes", "fed_norms", np.float64, np.nan)[widths(picked, "notes", "fed_norms") > 0]
        return np.repeat(np.arange(len(self)), rows), position, norms


def from_history(history: History, source: str, warnings: Iterable[str] = ()) -> Side:
    """A history as a side, along its current branch."""
    visited: dict[str, list[Visit]] = {name: [] for name in history.requests}
    for visit in visits(history):
        visited[visit.request.id].append(visit)
    in_part, tells_preempted = any(record.absent is not None for record in history.steps), history.tells_preempted
    requests: list[SideRequest] = []
    judged: list[Visit] = []
    for request, mine in zip(history.requests.values(), visited.values(), strict=True):
        preempted = len(request.preemptions) if tells_preempted else None
        decoded = [visit for visit in mine if visit.part.is_judged]
        whole = not in_part or _is_whole(request, mine)
        requests.append(SideRequest(request.id, request.info, preempted, whole, len(judged), len(decoded)))
        judged += decoded
    prefills = sum(visit.part.prefill_tokens > 0 for mine in visited.values() for visit in mine)
    capture = Capture(source, history.run, list(warnings), len(history.steps), prefills)
    around = [(visit.record.step, visit.record.batch, PRECEDED.index(visit.preceded)) for visit in judged]
    columns = Columns([visit.part for visit in judged])
    return Side([capture], requests, history.vocabulary, columns, *np.array(around, np.int64).reshape(-1, 3).T)


def _is_whole(request: RequestHistory, steps: Sequence[Visit]) -> bool:
    """Whether all steps of a request are there, as far as is known; also where there are none but its figures."""
    told = request.end is None or len(request.end.output) == sum(visit.part.emitted for visit in steps)
    return not steps or (told and [visit.part.index for visit in steps] == list(range(len(steps))))


def joined(sides: Sequence[Side]) -> Side:
    """Several captures as one side."""
    if len(sides) == 1:
        return sides[0]
    captures, requests, parts, vocabulary = list[Capture](), list[SideRequest](), list[RequestStep](), Vocabulary()
    for side in sides:
        at = len(captures)
        requests += [replace(each, first=each.first + len(parts), capture=at) for each in side.requests]
        captures += side.captures
        parts += side.columns.parts
        vocabulary.pieces.update(side.vocabulary.pieces)
        vocabulary.special.update(side.vocabulary.special)
    around = (np.concatenate([getattr(side, name) for side in sides]) for name in ("step", "batch", "preceded"))
    return Side(captures, requests, vocabulary, Columns(parts), *around)


class NoStepsError(UserError):
    """A capture without decode steps: it may hold counts."""


def read_side(path: str, progress: Progress | None = None) -> Side:
    """One capture. Raises UserError."""
    read = read_capture(path, progress)
    return from_history(read.history, path, read.warnings)


def read_sides(a: Sequence[str], b: Sequence[str], progress: Progress | None = None) -> tuple[Side, Side]:
    """Both sides, large captures in processes of their own. Raises UserError."""
    paths = [*a, *b]  # reading reports those that are no files
    apart = min(sum(os.path.isfile(path) and os.path.getsize(path) > LARGE for path in paths), os.cpu_count() or 1) > 1
    sides = _read_apart(paths, progress) if apart else [read_side(path, progress) for path in paths]
    for path, side in zip(paths, sides, strict=True):
        if not len(side):
            raise NoStepsError(f"{path} holds no decode steps: there is nothing to compare")
    return joined(sides[: len(a)]), joined(sides[len(a) :])


def _read_apart(paths: Sequence[str], progress: Progress | None) -> list[Side]:
    context = multiprocessing.get_context("spawn")
    done: dict[int, Side] = {}
    shares = [0.0] * len(paths)
    going: dict[Connection, tuple[int, SpawnProcess]] = {}
    try:
        for index, path in enumerate(paths):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(path, theirs), daemon=True)
            with ignore_terminal():
                process.start()
            theirs.close()
            going[ours] = (index, process)
        while going:
            for ready in wait(list(going)):
                assert isinstance(ready, Connection)
                index, process = going[ready]
                try:
                    message = ready.recv()
                except EOFError:
                    raise UserError(f"reading {paths[index]} failed: its process ended (out of memory?)") from None
                if isinstance(message, UserError):
                    raise message
                if isinstance(message, tuple):
                    side, arrays = message
                    done[index] = pickle.loads(side, buffers=[ready.recv_bytes() for _ in range(arrays)])
                    message = 1.0
                    process.join()
                    del going[ready]
                shares[index] = message
                if progress:
                    progress(sum(shares) / len(shares))
    finally:
        for _, process in going.values():
            process.terminate()
    return [done[index] for index in range(len(paths))]


def _send(path: str, to: Connection) -> None:
    """In the process: send how much has been read, then the side, or why it cannot be read."""
    end_with_parent()
    try:
        side = read_side(path, to.send)
    except UserError as error:
        to.send(error)
        return
    arrays: list[pickle.PickleBuffer] = []  # each is sent from where it lies: one message would hold all of them again
    to.send((pickle.dumps(side, 5, buffer_callback=arrays.append), len(arrays)))
    for array in arrays:
        to.send_bytes(array.raw())
