"""From records to Columns: each record is taken apart as it is read, and let go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import (
    FED,
    KINDS,
    NODE,
    NORMS,
    PARENT,
    PRECEDED,
    STEP,
    Capture,
    Side,
    SideRequest,
    spans,
)
from specscope.trace.history.history import History
from specscope.trace.record.method import TEXT, model_part, text_part
from specscope.trace.record.records import (
    FinalKind,
    Preceded,
    RequestEnd,
    RequestStep,
    RunInfo,
    StepRecord,
    followed_by,
)
from specscope.trace.record.tree import ROOT, Drawn
from specscope.trace.record.vocabulary import Vocabulary

OTHERS = "other requests"  # MethodNotes.match_source
CHUNK = 4096  # rows that are held as Python objects
_KIND = {kind: at for at, kind in enumerate(KINDS)}
_PRECEDED = {what: at for at, what in enumerate(PRECEDED)}
_TREE = ("token", "parent", "q", "drawn")
_VERDICT = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass")


class Collector:
    """Takes records in order; `finish` gives their Side."""

    def __init__(self) -> None:
        self.requests: list[SideRequest] = []
        self.engine_steps = 0
        self._by_id: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._last: dict[str, Preceded] = {}  # what each request's next decode step is preceded by
        self._rows: list[tuple[Any, ...]] = []
        self._nodes: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in NODE}
        self._parents: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in PARENT}
        self._fed: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in FED}
        self._path: list[np.ndarray[Any, Any]] = []
        self._output: list[int] = []
        self._chunks: list[dict[str, np.ndarray[Any, Any]]] = []
        self._counts = [0, 0, 0, 0]  # nodes, path nodes, output tokens and parents so far
        self._rows_fed = 0

    def add(self, record: StepRecord) -> None:
        """One engine step."""
        self.engine_steps += 1
        for info in record.admitted:
            self._request(info.id).info = info
        for name in record.preempted:
            self._request(name).preempted += 1
            self._last[name] = Preceded.PREEMPTION
        batch = record.batch
        for part in record.requests:
            self._add_part(record.step, batch, part)
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

    def _name(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def _add_part(self, step: int, batch: int, part: RequestStep) -> None:
        self._request(part.request)
        verdict, n = part.verdict, len(part.tree)
        preceded = -1
        final: tuple[Any, ...] = (0, 0, 0, 0, 0.0, np.nan, 0.0, 1.0, np.nan)
        if verdict is not None:
            accepted = verdict.accepted
            final_gap = self._add_nodes(part) if n else _root_gap(part)
            if accepted:
                self._path.append(verdict.path)
            self._output += part.output()
            how = (verdict.final_p, _whole(part), verdict.final_coin, verdict.final_margin, final_gap)
            final = (accepted, n, verdict.token, _KIND[verdict.kind], *how)
            preceded = _PRECEDED[part.preceded or self._last.get(part.request, Preceded.PREFILL)]
            self._last[part.request] = followed_by(verdict)
        judged = verdict is not None
        forced = judged and len(verdict.forced) > 0  # type: ignore[union-attr]
        # In the order of STEP.
        row = (self._by_id[part.request], part.index, step, part.context_len, part.prefill_tokens, batch, judged)
        names = (self._name(part.rule), self._name(part.drafter))
        given = self._add_parents(part) if judged else 0
        fed = self._add_fed(part)
        behind = (*self._counts, given, self._rows_fed, fed)
        self._rows.append((*row, part.emitted, *final, preceded, *names, forced, _varies(part), *behind))
        self._rows_fed += fed
        self._counts[0] += n if judged else 0
        self._counts[1] += final[0]
        self._counts[2] += part.emitted
        self._counts[3] += given

    def _add_nodes(self, part: RequestStep) -> float:
        """The nodes of a tree; the gap where the final token was drawn."""
        verdict, tree, notes, parents, n = part.verdict, part.tree, part.notes, part.parents, len(part.tree)
        assert verdict is not None
        nodes = self._nodes
        for name in _TREE:
            nodes[name].append(getattr(tree, name))
        for name in _VERDICT:
            nodes[name].append(getattr(verdict, name))
        unknown = np.full(n, np.nan, np.float32)
        source = np.full(n, -1, np.int8)
        if part.method is not None and len(part.method.source):
            source[:] = part.method.source
        nodes["source"].append(source)
        nodes["prob"].append(unknown if notes is None else np.where(source == TEXT, np.float32(np.nan), notes.prob))
        nodes["score"].append(unknown if notes is None else notes.score)
        nodes["draw_margin"].append(_draw_margins(part))
        if parents is None:
            nodes["raw_p"].append(unknown)
            nodes["gap"].append(unknown)
            return float("nan")
        gaps = np.full(n + 1, np.nan, np.float32)
        if parents.top_p.shape[1:] >= (2,):
            gaps[parents.node + 1] = parents.top_p[:, 0] - parents.top_p[:, 1]
        above = tree.parent + 1
        nodes["raw_p"].append(np.where(np.isnan(gaps[above]), np.float32(np.nan), parents.raw_p))
        nodes["gap"].append(gaps[above])
        return float(gaps[verdict.path[-1] + 1 if len(verdict.path) else 0])

    def _add_parents(self, part: RequestStep) -> int:
        """What target and drafter gave; how many parents that are."""
        parents = part.parents
        if parents is None or not len(parents.node) or not parents.top.shape[1:] >= (1,):
            return 0
        for name in ("node", "choice", "choice_p", "entropy", "q_entropy", "choice_rank", "choice_q"):
            self._parents[name].append(getattr(parents, name))
        for name in ("draft_top", "draft_top_p"):
            drafters = getattr(parents, name)
            self._parents[name].append(drafters[:, 0] if drafters.shape[1:] >= (1,) else np.zeros(len(drafters)))
        self._parents["top"].append(parents.top[:, 0])
        self._parents["top_p"].append(parents.top_p[:, 0])
        two = parents.top_p.shape[1] > 1
        self._parents["top_gap"].append(
            parents.top_p[:, 0] - parents.top_p[:, 1] if two else parents.top_p[:, 0] * np.nan
        )
        return len(parents.node)

    def _add_fed(self, part: RequestStep) -> int:
        """The rows that fed a head; how many there are."""
        notes = part.notes
        if notes is None or not notes.fed_norms.size:
            return 0
        self._fed["position"].append(notes.fed_position)
        norms = np.full((len(notes.fed_position), len(NORMS)), np.nan, np.float32)
        known = notes.fed_norms[:, : len(NORMS)]
        norms[:, : known.shape[1]] = known
        for name, column in zip(NORMS, norms.T, strict=True):
            self._fed[name].append(column)
        return len(norms)

    def _flush(self) -> None:
        """Rows to arrays."""
        chunk: dict[str, np.ndarray[Any, Any]] = {"steps": np.array(self._rows, STEP)}
        for of, kinds, held in (
            ("node", NODE, self._nodes),
            ("parent", PARENT, self._parents),
            ("fed", FED, self._fed),
        ):
            for name, kind in kinds.items():
                parts = held[name]
                whole = np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, kind)
                chunk[f"{of} {name}"] = whole
                parts.clear()
        chunk["path"] = np.concatenate(self._path).astype(np.int32) if self._path else np.zeros(0, np.int32)
        chunk["output"] = np.array(self._output, np.int32)
        self._rows.clear()
        self._path.clear()
        self._output.clear()
        self._chunks.append(chunk)

    def finish(self, source: str, run: RunInfo | None, vocabulary: Vocabulary, warnings: list[str]) -> Side:
        """The side, its rows sorted by request."""
        self._flush()
        whole = {name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in self._chunks[0]}
        self._chunks.clear()
        steps = whole["steps"]
        steps = steps[np.argsort(steps["request"], kind="stable")]
        nodes_at = spans(steps["first_node"], steps["nodes"])
        parents_at = spans(steps["first_parent"], steps["parents"])
        fed_at = spans(steps["first_fed"], steps["fed"])
        path = whole["path"][spans(steps["first_path"], steps["accepted"])]
        output = whole["output"][spans(steps["first_output"], steps["emitted"])]
        for first, count in (
            ("first_node", "nodes"),
            ("first_path", "accepted"),
            ("first_output", "emitted"),
            ("first_parent", "parents"),
            ("first_fed", "fed"),
        ):
            steps[first] = np.cumsum(steps[count]) - steps[count]
        for at, request in enumerate(self.requests):
            request.first = int(np.searchsorted(steps["request"], at))
            request.count = int(np.searchsorted(steps["request"], at, "right")) - request.first
        capture = Capture(source, run, warnings, self.engine_steps)
        nodes = {name: whole[f"node {name}"][nodes_at] for name in NODE}
        parents = {name: whole[f"parent {name}"][parents_at] for name in PARENT}
        fed = {name: whole[f"fed {name}"][fed_at] for name in FED}
        return Side([capture], self.requests, list(self._names), steps, nodes, parents, fed, path, output, vocabulary)


def _draw_margins(part: RequestStep) -> NDArray[np.float64]:
    """How near each draw of the drafter was to another token; NaN where a draw's margin is not recorded."""
    if part.notes is not None and len(part.notes.draw_margin):
        return part.notes.draw_margin
    return np.where(part.tree.drawn == Drawn.DETERMINISTIC, 1.0, np.nan)


def _varies(part: RequestStep) -> bool:
    """Whether costs, load or other requests decide what is drafted as well as the context.

    An adaptive tree has the size that pays at the time; a text and a model together are ranked by what was accepted
    so far; a shared suffix tree holds what other requests said before.
    """
    together = text_part(part.drafter) != "" and model_part(part.drafter) != ""
    return bool(part.sizing) or together or (part.method is not None and OTHERS in part.method.match_source)


def _whole(part: RequestStep) -> float:
    """The final token's probability in the target's whole p; without the notes a residual's is not known."""
    verdict = part.verdict
    assert verdict is not None
    if part.parents is not None:
        return part.parents.final_target_p
    return float("nan") if verdict.kind is FinalKind.RECOVERED else verdict.final_p


def _root_gap(part: RequestStep) -> float:
    """The gap at the root of a step without drafts, where it was recorded."""
    parents = part.parents
    if parents is None or not len(parents.node) or parents.node[0] != ROOT or parents.top_p.shape[1] < 2:
        return float("nan")
    return float(parents.top_p[0, 0] - parents.top_p[0, 1])


class BranchedError(Exception):
    """The run was edited: only a whole History knows its path."""


class CollectingHistory(History):
    """A history that keeps no records: CaptureReader fills it, and a Collector takes them apart."""

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
    """The side that these records are, in their order."""
    collector = Collector()
    for record in records:
        collector.add(record)
    return collector.finish(source, run, vocabulary or Vocabulary(), [])


def from_history(history: History, source: str, warnings: Iterable[str] = ()) -> Side:
    """The side that a history is, along the branch on which it stands."""
    side = collect(history.steps, source, history.run, history.vocabulary)
    side.captures[0].warnings += warnings
    return side
