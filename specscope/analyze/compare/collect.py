"""From records to a Side: each record is turned into arrays soon after it is read, and then released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import FED, NODE, NORMS, PARENT, STEP, Capture, Side, SideRequest, number_rows
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import KINDS, PRECEDED, Columns
from specscope.analyze.evidence.fields import holding, joined, lengths, numbers, padded, widths, words
from specscope.analyze.evidence.parents import TriedParents
from specscope.trace.history.history import History
from specscope.trace.history.stats import StepCounts
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.records import (
    FinalKind,
    Preceded,
    RequestEnd,
    RequestStep,
    RunInfo,
    StepRecord,
    followed_by,
)
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import Bools, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.run.packed import Picked, slices

OTHERS = "other requests"  # MethodNotes.match_source
CHUNK = 256  # steps that are held as records before they become arrays
RECOVERED = KINDS.index(FinalKind.RECOVERED)
AROUND = ("request", "step", "batch", "preceded")  # columns of STEP: what lies around a part
OF_PART = {"index": "index", "context": "context_len", "prefill": "prefill_tokens", "emitted": "emitted"}


class Collector:
    """Takes records in order; `finish` gives their Side."""

    def __init__(self) -> None:
        self.requests: list[SideRequest] = []
        self.engine_steps = 0
        self._in_part = False  # whether something of a step is not in the file
        self._preempted = Counter[str]()  # how many times each request was
        self._tells_preempted = True
        self._by_id: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._last: dict[str, Preceded] = {}  # what each request's next decode step is preceded by
        self._parts: list[RequestStep] = []  # not laid out yet
        self._around: list[tuple[int, int, int, int]] = []  # of each of them, by the names of AROUND
        self._chunks: list[dict[str, NDArray[Any]]] = []

    def add(self, record: StepRecord) -> None:
        """One engine step."""
        self.engine_steps += 1
        self._in_part |= record.absent is not None
        self._tells_preempted &= record.tells_preempted
        for info in record.admitted:
            self._request(info.id).info = info
        for name in record.preempted:
            self._request(name)
            self._preempted[name] += 1
            self._last[name] = Preceded.PREEMPTION
        for part in record.requests:
            self._request(part.request)
            self._parts.append(part)
            self._around.append((self._by_id[part.request], record.step, record.batch, self._preceded(part)))
        for end in record.finished:
            self._end(end)
        if len(self._parts) >= CHUNK:
            self._flush()

    def _request(self, name: str) -> SideRequest:
        if name not in self._by_id:
            self._by_id[name] = len(self.requests)
            self.requests.append(SideRequest(name, 0, None, None))
        return self.requests[self._by_id[name]]

    def _end(self, end: RequestEnd) -> None:
        request = self._request(end.info.id)
        request.info, request.reason = request.info or end.info, end.reason
        request.length = len(end.output)

    def _preceded(self, part: RequestStep) -> int:
        if (counts := StepCounts.of(part)) is None:
            return -1
        preceded = part.preceded or self._last.get(part.request, Preceded.PREFILL)
        self._last[part.request] = followed_by(counts.kind, counts.drafted, counts.accepted)
        return PRECEDED.index(preceded)

    def _name(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def _flush(self) -> None:
        """Turn the parts held so far into arrays."""
        picked = Picked.of(self._parts)
        judged = holding(picked, "verdict")
        c = Columns([part for part, yes in zip(self._parts, judged.tolist(), strict=True) if yes])
        chunk = {name: getattr(c, name).astype(np.int32) for name in ("path", "output")}
        chunk["steps"] = self._steps(picked, judged, c)
        chunk |= {f"node {name}": values.astype(NODE[name]) for name, values in _nodes(c).items()}
        listed = c.parents.tops > 0
        chunk |= {f"parent {name}": values[listed].astype(PARENT[name]) for name, values in _parents(c.parents).items()}
        chunk |= {f"fed {name}": values.astype(FED[name]) for name, values in _fed(picked).items()}
        self._parts, self._around = [], []
        self._chunks.append(chunk)

    def _steps(self, picked: Sequence[Picked], judged: Bools, c: Columns) -> NDArray[Any]:
        """The parts held so far as an array of STEP; `c` holds those that are judged."""
        steps = np.zeros(len(judged), STEP)
        for name, values in zip(AROUND, np.array(self._around, np.int64).reshape(-1, len(AROUND)).T, strict=True):
            steps[name] = values
        for name, of_part in OF_PART.items():
            steps[name] = numbers(picked, "", of_part)
        steps["rule"] = [self._name(rule or STANDARD) for rule in words(picked, "verdict", "rule")]
        drafters = words(picked, "", "drafter")
        steps["drafter"] = list(map(self._name, drafters))
        sources = words(picked, "method", "match_source")
        steps["varies"] = list(map(_varies, drafters, words(picked, "", "sizing"), sources))
        steps["fed"] = _rows_fed(picked)
        steps["judged"] = judged
        steps["final_margin"], steps["final_whole"], steps["final_gap"] = 1.0, np.nan, np.nan
        # The final token's p in the target's whole p: without the notes a residual's is not known
        known = np.where(c.kind == RECOVERED, np.nan, c.final_p)
        of_judged = {
            "accepted": c.depth_reached,
            "nodes": np.diff(c.start),
            "token": c.final,
            **{name: getattr(c, name) for name in ("kind", "final_p", "final_coin", "final_margin")},
            "forced": lengths(c.picked, "verdict", "forced") > 0,
            "final_whole": np.where(c.parents.there, c.parents.final_p, known),
            "final_gap": c.parents.of_rows(c.parents.gap, c.final_row),
            "parents": np.bincount(c.parents.step[c.parents.tops > 0], minlength=len(c)),
        }
        for name, values in of_judged.items():
            steps[name][judged] = values
        return steps

    def finish(self, source: str, run: RunInfo | None, vocabulary: Vocabulary, warnings: list[str]) -> Side:
        """The side, its rows sorted by request."""
        self._flush()
        whole = {name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in self._chunks[0]}
        self._chunks.clear()
        steps = whole["steps"]
        number_rows(steps)
        steps = steps[np.argsort(steps["request"], kind="stable")]
        nodes_at = slices(steps["first_node"], steps["nodes"])
        parents_at = slices(steps["first_parent"], steps["parents"])
        fed_at = slices(steps["first_fed"], steps["fed"])
        path = whole["path"][slices(steps["first_path"], steps["accepted"])]
        output = whole["output"][slices(steps["first_output"], steps["emitted"])]
        number_rows(steps)
        for number, request in enumerate(self.requests):
            request.first = int(np.searchsorted(steps["request"], number))
            request.count = int(np.searchsorted(steps["request"], number, "right")) - request.first
            request.preempted = self._preempted[request.id] if self._tells_preempted else None
            request.whole = not self._in_part or _is_whole(request, steps[request.first :][: request.count])
        capture = Capture(source, run, warnings, self.engine_steps)
        nodes = {name: whole[f"node {name}"][nodes_at] for name in NODE}
        parents = {name: whole[f"parent {name}"][parents_at] for name in PARENT}
        fed = {name: whole[f"fed {name}"][fed_at] for name in FED}
        return Side([capture], self.requests, list(self._names), steps, nodes, parents, fed, path, output, vocabulary)


def _is_whole(request: SideRequest, steps: NDArray[Any]) -> bool:
    """Whether all steps of a request are there, as far as is known; also where there are none but its figures."""
    told = request.length in (None, int(steps["emitted"].sum()))
    return not len(steps) or (told and bool((steps["index"] == np.arange(len(steps))).all()))


def _nodes(c: Columns) -> dict[str, NDArray[Any]]:
    """[N] each, by the names of NODE."""
    names = ("token", "parent", "q", "drawn", "outcome", "p", "p_trial", "q_trial", "accept_prob", "coin")
    gap = c.parents.of_rows(c.parents.gap, c.row)
    return {
        **{name: getattr(c, name) for name in (*names, "residual_mass", "score", "source")},
        "prob": c.draft_prob,
        # How near each draw of the drafter was to another token; NaN where a draw's margin is not recorded
        "draw_margin": np.where(np.isnan(c.draw_margin) & (c.drawn == Drawn.DETERMINISTIC), 1.0, c.draw_margin),
        "raw_p": np.where(np.isnan(gap), np.nan, c.parents.raw_p),
        "gap": gap,
    }


def _parents(parents: TriedParents) -> dict[str, NDArray[Any]]:
    """[K] each, by the names of PARENT."""
    names = ("node", "choice", "choice_p", "entropy", "q_entropy", "choice_rank", "choice_q")
    firsts = {name: _first(getattr(parents, name)) for name in ("top", "top_p", "draft_top", "draft_top_p")}
    firsts["draft_top"] = np.where(parents.draft_tops > 0, firsts["draft_top"], 0)
    return {**{name: getattr(parents, name) for name in names}, **firsts, "top_gap": parents.gap}


def _first(table: NDArray[Any]) -> NDArray[Any]:
    """[K] the first column of a table [K, t]; 0 where there is none."""
    return table[:, 0] if table.shape[1] else np.zeros(len(table))


def _rows_fed(picked: Sequence[Picked]) -> Indices:
    """[S] rows of the target's features that the drafter's first pass was fed, where they are recorded."""
    return np.where(lengths(picked, "notes", "fed_norms") > 0, lengths(picked, "notes", "fed_position"), 0)


def _fed(picked: Sequence[Picked]) -> dict[str, NDArray[Any]]:
    """[F] each, by the names of FED."""
    counts = lengths(picked, "notes", "fed_position")
    position = joined(picked, "notes", "fed_position", np.int32)[np.repeat(_rows_fed(picked) > 0, counts)]
    known = padded(picked, "notes", "fed_norms", np.float32, np.nan)[:, : len(NORMS)]
    known = known[widths(picked, "notes", "fed_norms") > 0]
    norms = np.full((len(position), len(NORMS)), np.nan, np.float32)
    norms[:, : known.shape[1]] = known
    return {"position": position, **dict(zip(NORMS, norms.T, strict=True))}


def _varies(drafter: str, sizing: str, match_source: str | None) -> bool:
    """Whether costs, load or other requests decide what is drafted as well as the context.

    An adaptive tree has the size that pays at the time; a text and a model together are ranked by what was accepted
    so far; a shared suffix tree holds what other requests generated before.
    """
    together = text_part(drafter) != "" and model_part(drafter) != ""
    return bool(sizing) or together or OTHERS in (match_source or "")


class BranchedError(Exception):
    """The run was edited: only a whole History knows its path."""


class CollectingHistory(History):
    """A history that keeps no records: CaptureReader fills it, and a Collector turns them into arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.collector = Collector()

    def append(self, record: StepRecord) -> None:
        """Take one more step."""
        if record.after is not None:
            raise BranchedError
        self.collector.add(record)
        self.acceptance.steps += sum(part.is_judged for part in record.requests)
        for info in record.admitted:
            self.request(info.id).info = info
        for end in record.finished:
            self.request(end.info.id).end = end


def collect(
    records: Iterable[StepRecord], source: str, run: RunInfo | None = None, vocabulary: Vocabulary | None = None
) -> Side:
    """These records, in their order, as a side."""
    collector = Collector()
    for record in records:
        collector.add(record)
    return collector.finish(source, run, vocabulary or Vocabulary(), [])


def from_history(history: History, source: str, warnings: Iterable[str] = ()) -> Side:
    """A history as a side, along its current branch."""
    side = collect(history.steps, source, history.run, history.vocabulary)
    side.captures[0].warnings += warnings
    return side
