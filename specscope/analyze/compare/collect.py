"""From records to a Side: each record is turned into arrays soon after it is read, and then released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import FED, NODE, NORMS, PARENT, STEP, Capture, Side, SideRequest, number_rows
from specscope.analyze.evidence.columns import KINDS, PRECEDED, Columns
from specscope.analyze.evidence.parents import TriedParents
from specscope.trace.history.history import History
from specscope.trace.record.notes import DraftNotes, model_part, text_part
from specscope.trace.record.records import (
    FinalKind,
    Preceded,
    RequestEnd,
    RequestStep,
    RunInfo,
    StepRecord,
    followed_by,
)
from specscope.trace.record.tree import Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.run.packed import slices

OTHERS = "other requests"  # MethodNotes.match_source
CHUNK = 256  # steps that are held as records before they become arrays
RECOVERED = KINDS.index(FinalKind.RECOVERED)


class _Row(NamedTuple):
    """A request's part in a step, before it becomes arrays."""

    part: RequestStep
    request: int  # its place in Side.requests
    step: int
    batch: int
    preceded: int  # its place in PRECEDED; -1 for a prefill chunk


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
        self._rows: list[_Row] = []
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
            preceded = self._preceded(part)
            self._rows.append(_Row(part, self._by_id[part.request], record.step, record.batch, preceded))
        for end in record.finished:
            self._end(end)
        if len(self._rows) >= CHUNK:
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
        if part.verdict is None:
            return -1
        preceded = part.preceded or self._last.get(part.request, Preceded.PREFILL)
        self._last[part.request] = followed_by(part.verdict)
        return PRECEDED.index(preceded)

    def _name(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def _flush(self) -> None:
        """Turn the rows held so far into arrays."""
        parts = [row.part for row in self._rows]
        c = Columns([part for part in parts if part.verdict is not None])
        notes = [part.notes for part in parts]
        chunk = {"steps": self._steps(c)}
        chunk |= {f"node {name}": values.astype(NODE[name]) for name, values in _nodes(c).items()}
        listed = c.parents.tops > 0
        chunk |= {f"parent {name}": values[listed].astype(PARENT[name]) for name, values in _parents(c.parents).items()}
        chunk |= {f"fed {name}": values.astype(FED[name]) for name, values in _fed(notes).items()}
        paths = [verdict.path for verdict in c.verdicts]
        chunk["path"] = np.concatenate([np.zeros(0, np.int32), *paths]).astype(np.int32)
        chunk["output"] = np.array([token for part in parts for token in part.output()], np.int32)
        self._rows.clear()
        self._chunks.append(chunk)

    def _steps(self, c: Columns) -> NDArray[Any]:
        """The rows held so far as an array of STEP; `c` holds the parts with a verdict."""
        rows, parts = self._rows, [row.part for row in self._rows]
        steps = np.zeros(len(rows), STEP)
        for name in ("request", "step", "batch", "preceded"):
            steps[name] = [getattr(row, name) for row in rows]
        for name, of_part in (("index", "index"), ("context", "context_len"), ("prefill", "prefill_tokens")):
            steps[name] = [getattr(part, of_part) for part in parts]
        steps["emitted"] = [part.emitted for part in parts]
        steps["rule"] = [self._name(part.rule) for part in parts]
        steps["drafter"] = [self._name(part.drafter) for part in parts]
        steps["varies"] = [_varies(part) for part in parts]
        steps["fed"] = [0 if part.notes is None else _rows_fed(part.notes) for part in parts]
        steps["final_margin"], steps["final_whole"], steps["final_gap"] = 1.0, np.nan, np.nan
        judged = steps["judged"] = np.array([part.verdict is not None for part in parts], np.bool_)
        steps["accepted"][judged] = [verdict.accepted for verdict in c.verdicts]
        steps["nodes"][judged] = np.diff(c.start)
        steps["token"][judged] = c.final
        steps["kind"][judged] = c.kind
        steps["final_p"][judged] = c.final_p
        steps["final_coin"][judged] = c.final_coin
        steps["final_margin"][judged] = c.final_margin
        steps["forced"][judged] = [len(verdict.forced) > 0 for verdict in c.verdicts]
        # The final token's p in the target's whole p: without the notes a residual's is not known
        known = np.where(c.kind == RECOVERED, np.nan, c.final_p)
        steps["final_whole"][judged] = np.where(c.parents.there, c.parents.final_p, known)
        steps["final_gap"][judged] = c.parents.of_rows(c.parents.gap, c.final_row)
        counts = np.bincount(c.parents.step[c.parents.tops > 0], minlength=len(c))
        steps["parents"][judged] = counts
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


def _rows_fed(notes: DraftNotes) -> int:
    """Rows of the target's features that the drafter's first pass was fed, where they are recorded."""
    return len(notes.fed_position) if notes.fed_norms.size else 0


def _fed(notes: Iterable[DraftNotes | None]) -> dict[str, NDArray[Any]]:
    """[F] each, by the names of FED."""
    with_norms = [note for note in notes if note is not None and _rows_fed(note)]
    norms = np.full((sum(len(note.fed_position) for note in with_norms), len(NORMS)), np.nan, np.float32)
    begin = 0
    for note in with_norms:
        known = note.fed_norms[:, : len(NORMS)]
        norms[begin : begin + len(known), : known.shape[1]] = known
        begin += len(known)
    position = np.concatenate([np.zeros(0, np.int32), *(note.fed_position for note in with_norms)])
    return {"position": position, **dict(zip(NORMS, norms.T, strict=True))}


def _varies(part: RequestStep) -> bool:
    """Whether costs, load or other requests decide what is drafted as well as the context.

    An adaptive tree has the size that pays at the time; a text and a model together are ranked by what was accepted
    so far; a shared suffix tree holds what other requests generated before.
    """
    together = text_part(part.drafter) != "" and model_part(part.drafter) != ""
    return bool(part.sizing) or together or (part.method is not None and OTHERS in part.method.match_source)


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
        self.acceptance.steps += sum(part.verdict is not None for part in record.requests)
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
