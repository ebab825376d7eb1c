"""The rows of a run that was read. A column that a record or the evidence has under its name is that; the others are
worked out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import flags, holding, lengths, numbers, words
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.export.schema import STEP, TABLES, Column, clean, schema_of
from specscope.trace.history.history import History
from specscope.trace.history.totals import why_undrafted
from specscope.trace.record.notes import SOURCES, MethodNotes
from specscope.trace.record.privacy import NO_TOKEN, Privacy, strip, told_ids
from specscope.trace.record.records import (
    PHASES,
    Outcome,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    decode_steps,
    missing_steps,
)
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import Bools, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.run.packed import Picked

MOST_STEPS, MOST_NODES = 4096, 25_000  # request steps, and their nodes, whose rows are made at once
OUTCOMES, DRAWN = ([one.name.lower() for one in kind] for kind in (Outcome, Drawn))
Array = NDArray[Any]
Batches = Iterator[tuple[str, pa.RecordBatch]]  # of rows, each of the table of that name


class Source:
    """A capture, whose records are taken in their order."""

    def __init__(self, name: str, history: History, privacy: Privacy = Privacy.EVERYTHING) -> None:
        """`name`: as it was given. `history`: what is known of it; where that keeps no steps, all are on the path."""
        self.name, self.history, self.privacy = name, history, privacy  # left out besides
        self.vocabulary = Vocabulary() if privacy else history.vocabulary
        self._count = self._nodes = 0  # of records; of nodes in `_held`
        self._requests: dict[str, _Request] = {}
        self._held: list[tuple[StepRecord, RequestStep]] = []
        self._rows: dict[str, list[Sequence[object]]] = {"requests": [], "intervals": []}

    @property
    def run(self) -> RunInfo:
        assert self.history.run is not None  # CaptureReader sees to it
        run = self.history.run
        return strip(replace(run, privacy=max(run.privacy, self.privacy)), self.privacy) if self.privacy else run

    @cached_property
    def named(self) -> dict[str, str]:
        name = self.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return {"run": self.run.run_id, "capture": clean(name)}

    @cached_property
    def _path(self) -> set[int]:
        return {record.step for record in self.history.steps}

    def is_current(self, record: StepRecord) -> bool:
        """Whether a step is on the path to the run's end."""
        return not self._path or record.step in self._path

    def steps(self, records: Iterable[StepRecord]) -> Batches:
        """Steps, nodes, final tokens and parents; requests that end; and intervals."""
        for record in (strip(each, self.privacy) for each in records):
            self._count += 1
            self._held += [(record, part) for part in record.requests]
            self._nodes += sum(len(part.told("tree", "token")) for part in record.requests)
            self._rows["requests"] += self._ended(record)
            self._rows["intervals"] += [] if record.aggregate is None else [(record.aggregate, record)]
            if max(len(self._held), *map(len, self._rows.values())) >= MOST_STEPS or self._nodes >= MOST_NODES:
                yield from self._filled()
        yield from self._filled()

    def _filled(self) -> Batches:
        """The rows of what is held, which is let go."""
        if self._held:
            yield from Chunk(self, self._held).batches()
        for table, rows in self._rows.items():
            yield self._batch(table, rows)
            rows.clear()
        self._held, self._nodes = [], 0

    def _ended(self, record: StepRecord) -> Iterator[tuple[object, ...]]:
        """The row of each request that ends in a step."""
        ends, infos = {end.info.id: end for end in record.finished}, {info.id: info for info in record.admitted}
        here = self.is_current(record)
        for name in dict.fromkeys([*infos, *(part.request for part in record.requests), *ends, *record.preempted]):
            request = self._requests.setdefault(name, _Request(name))
            request.branch, request.current = record.branch, request.current or here
            request.info = infos.get(name, request.info)
            request.prompt = len(infos[name].prompt_tokens) if name in infos else request.prompt
        for part in record.requests:
            request = self._requests[part.request]
            request.steps, request.through = request.steps + 1, part.index + 1
            request.decoded += part.is_judged
        for name, end in ends.items():
            self._requests[name].ended.add(here)
            self._requests[name].counted = decode_steps(end)
            self._requests[name].info = None if here else self._requests[name].info
            yield _Request(name, record.branch, here, end.info, end).told(self.vocabulary)

    def prompts(self, request: str) -> int:
        return self._requests[request].prompt

    @property
    def gaps(self) -> list[int]:
        """Of each request, how many steps are missing."""
        requests = self._requests.values()
        return [missing_steps(each.through, each.steps, each.decoded, each.counted) for each in requests]

    @property
    def unfinished(self) -> int:
        return sum(not request.ended for request in self._requests.values())

    def others(self, warnings: Sequence[str]) -> Batches:
        """The run, its tokens, and the requests that did not end, or on an abandoned branch alone."""
        run, vocabulary = self.run, self.vocabulary
        told = {
            "draft_vocab": run.draft_vocab or None,
            "text": run.tells_text,
            "tokens": run.tells_tokens,
            "engine_steps": self._count,
            "lost": self.history.lost,
            "warnings": tuple(warnings),
        }
        tokens = [
            ({"token": token, "piece": _text(piece), "special": token in vocabulary.special},)
            for token, piece in sorted(vocabulary.pieces.items())
        ]
        yield self._batch("runs", [(told, run)])
        yield self._batch("requests", [each.told(vocabulary) for each in self._requests.values() if each.is_open])
        yield self._batch("tokens", tokens)

    def _batch(self, table: str, rows: Sequence[Sequence[object]]) -> tuple[str, pa.RecordBatch]:
        """Of each row, what the first of some records has under a column's name."""
        columns = [column.array([_told(column.name, (self.named, *row)) for row in rows]) for column in TABLES[table]]
        return table, pa.RecordBatch.from_arrays(columns, schema=schema_of(table))


def _told(name: str, records: Sequence[object]) -> Any:  # noqa: ANN401
    """What the first of these has under a name; None where none has."""
    for record in records:
        if name in record if isinstance(record, Mapping) else hasattr(record, name):
            return record[name] if isinstance(record, Mapping) else getattr(record, name)
    return None


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "backslashreplace")


@dataclass
class _Request:
    """A time that a request ended, or a request that did not."""

    name: str
    branch: int = 0  # of its last step
    current: bool = False  # whether some of it is on the path to the run's end
    info: RequestInfo | None = None
    end: RequestEnd | None = None
    ended: set[bool] = field(default_factory=set)  # whether on that path, each time that it ended
    steps: int = 0
    through: int = 0  # the number of the last of them and one
    decoded: int = 0  # decode steps among them
    counted: int = 0  # and those that its end counts
    prompt: int = 0  # tokens of it

    @property
    def is_open(self) -> bool:
        """Whether it did not end, or on an abandoned branch alone; not of one that is only named."""
        named = self.info is None and not self.steps
        return not named and (not self.ended or (self.current and True not in self.ended))

    def told(self, vocabulary: Vocabulary) -> tuple[object, ...]:
        """Where its row is from."""
        info, end = self.info, self.end
        told: dict[str, Any] = {"request": self.name, "branch": self.branch, "current": self.current, "stop": None}
        if info is not None:
            form = info.params.structured_outputs
            told |= {
                "admitted_ns": info.admitted_ns or None,
                "prompt_tokens": told_ids(info.prompt_tokens) or None,
                "prompt_length": len(info.prompt_tokens) or None,
                "stop_strings": info.params.stop,
                "structured_outputs": None if form is None else json.dumps(form.to_dict()),
                **dict.fromkeys("stop_strings" if name == "stop" else name for name in info.params.left_out),
            }
        if end is not None:
            tokens = told_ids(end.output)
            told |= {
                "stop": end.stop,
                "output": None if tokens is None else vocabulary.text(tokens),
                "output_tokens": tokens,
                "output_length": len(end.output),
                "sampling": end.sampled and end.sampled.reason,
                "sampling_ratio": (end.sampled and end.sampled.ratio) or None,
            }
        return told, *(record for record in (end, info, info and info.params) if record is not None)


class Chunk:
    """Some request steps of a run: `c` are their decode steps and nodes, `e` the parents that were tried."""

    def __init__(self, source: Source, held: Sequence[tuple[StepRecord, RequestStep]]) -> None:
        self._source, self._held = source, held
        self.records = [record for record, _ in held]
        self.picked = Picked.of([part for _, part in held])
        self._judged = np.flatnonzero(self.holds("verdict"))
        self.c = Columns([held[row][1] for row in self._judged.tolist()])
        self.e = self.c.parents

    def holds(self, name: str) -> Bools:
        """[S] whether each step holds one: a verdict, notes."""
        return holding(self.picked, name)

    # [S] whether the engine's step is known. [N] whether the node was tried, and p was recorded; a model drafted it.
    # [K] whether a draft model ran at the parent: beside text lookup it may not have
    timed = flags(lambda s: np.array([record.is_timed for record in s.records], np.bool_))
    judged_nodes = flags(lambda s: s.c.tells_p[s.c.step] & s.c.tried)
    noted_nodes = flags(lambda s: holding(s.c.picked, "notes")[s.c.step])
    looked = flags(lambda s: np.any(s.e.draft_top_p > 0, axis=1))

    def batches(self) -> Batches:
        c, e = self.c, self.e
        steps = self._arrays(TABLES["steps"], self._steps(), self._of_steps)
        parents = self._arrays(TABLES["parents"][len(STEP) :], self._parents(), e.__getattribute__)
        nodes = self._arrays(TABLES["nodes"][len(STEP) :], self._nodes(parents), c.__getattribute__)
        finals = self._arrays(TABLES["finals"][len(STEP) :], self._finals(), c.__getattribute__)
        yield "steps", pa.RecordBatch.from_arrays(list(steps.values()), schema=schema_of("steps"))
        judged = self._judged
        for table, rows, columns in (
            ("nodes", judged[c.step], nodes),
            ("finals", judged, finals),
            ("parents", judged[e.step], parents),
        ):
            keys = [steps[column.name].take(pa.array(rows)) for column in STEP]
            yield table, pa.RecordBatch.from_arrays([*keys, *columns.values()], schema=schema_of(table))
        del vars(c)["parents"]  # the two know each other, and nobody looks for cycles while a capture is read

    def _arrays(
        self, columns: Sequence[Column], told: Mapping[str, Any], other: Callable[[str], Any]
    ) -> dict[str, pa.Array]:
        return {
            column.name: column.array(told[column.name] if column.name in told else other(column.name), self)
            for column in columns
        }

    def _steps(self) -> dict[str, Any]:
        """[S] each."""
        picked, judged, c = self.picked, self.holds("verdict"), self.c
        records, run = self.records, self._source.run
        spent = [{phase.name: phase.end_ns - phase.start_ns for phase in record.phases} for record in records]
        root = numbers(picked, "", "context_len") + numbers(picked, "", "prefill_tokens")
        prompt = np.array([self._source.prompts(name) for name in words(picked, "", "request")])
        depth = np.zeros(len(records), np.int32)
        depth[judged] = c.tree_depth
        return {
            **{name: coded([text], np.zeros(len(records))) for name, text in self._source.named.items()},
            "current": list(map(self._source.is_current, records)),
            "step_ns": [record.end_ns - record.start_ns for record in records],
            **{f"{name}_ns": [each.get(name) for each in spent] for name in PHASES},
            "pass_ns": [[phase.end_ns - phase.start_ns for phase in record.passes] for record in records],
            "output_position": pa.array(root + 1 - prompt, mask=~judged | (prompt == 0)),
            "rule": [rule or STANDARD for rule in words(picked, "verdict", "rule")],
            "undrafted": [why_undrafted(run, record, part) for record, part in self._held],
            "nodes": lengths(picked, "tree", "token"),
            "depth": depth,
            "dropped": lengths(picked, "notes", "dropped_token"),
            "drafter_cached": numbers(picked, "notes", "cached"),
            "accepted": lengths(picked, "verdict", "path"),
            "kind": words(picked, "verdict", "kind"),
            "forced": lengths(picked, "verdict", "forced") > 0,
        }

    def _of_steps(self, name: str) -> Any:  # noqa: ANN401
        """[S] what each request's step, its method or the engine's step has under this name."""
        for held, kind in (("", RequestStep), ("method", MethodNotes)):
            if name in kind.__dataclass_fields__:
                columns = numbers if name in self.picked[0].table(held).numbers else words
                return columns(self.picked, held, name)
        return [getattr(record, name) for record in self.records]

    def _parents(self) -> dict[str, Any]:
        """[K] each."""
        c, e = self.c, self.e
        depth = np.concatenate([[0], c.depth])[np.where(e.node < 0, 0, c.start[e.step] + e.node + 1)]
        top = _lists(e.top, e.top_p, e.tops, np.ones(len(e), np.bool_))
        draft_top = _lists(e.draft_top, e.draft_top_p, e.draft_tops, self.looked)
        names = ("top", "top_p", "draft_top", "draft_top_p")
        return {"depth": depth, **dict(zip(names, (*top, *draft_top), strict=True))}

    def _nodes(self, parents: Mapping[str, pa.Array]) -> dict[str, Any]:
        """[N] each. `parents`: the columns of parents."""
        c, e = self.c, self.e
        given = e.at_node >= 0
        tried, drawn = (pa.array(e.at_node, mask=~known) for known in (given, given & c.sampled))
        at_parent = {name: column.take(drawn if name.startswith("q_") else tried) for name, column in parents.items()}
        return {
            "sibling": c.sibling + 1,
            "piece": self._pieces(c.token),
            "drawn": coded(DRAWN, c.drawn),
            "outcome": coded(OUTCOMES, c.outcome),
            "judged": c.by_own_coin,
            "draft_p": c.prob,
            "source": coded(SOURCES, c.source, c.source >= 0),
            "raw_p": e.raw_p,
            "rank": e.rank,
            "q_rank": e.q_rank,
            **{f"parent_{name}": column for name, column in at_parent.items()},
        }

    def _finals(self) -> dict[str, Any]:
        """[D] each, of decode steps."""
        c, e = self.c, self.e
        return {
            "token": c.final,
            "piece": self._pieces(c.final),
            "kind": words(c.picked, "verdict", "kind"),
            "emitted": numbers(c.picked, "", "emitted") > c.depth_reached,
            "forced": c.forced_final,
            "p": c.final_p,
            "coin": c.final_coin,
            "margin": c.final_margin,
            "entropy": e.final_entropy,
            "varentropy": e.final_varentropy,
            "target_p": e.final_p,
        }

    def _pieces(self, tokens: Array) -> pa.Array:
        known, codes = np.unique(tokens, return_inverse=True)
        pieces = [self._source.vocabulary.pieces.get(token) for token in known.tolist()]
        there = np.array([piece is not None for piece in pieces], np.bool_)[codes]
        return coded(["" if piece is None else _text(piece) for piece in pieces], codes, there)


def coded(texts: Sequence[str], codes: Array, known: Bools | None = None) -> pa.Array:
    """Texts by their codes; null where not known."""
    indices = pa.array(codes.astype(np.int32), mask=None if known is None else ~known)
    return pa.DictionaryArray.from_arrays(indices, pa.array(texts, pa.string()))


def _lists(tokens: Array, shares: Array, widths: Array, given: Bools) -> Iterator[pa.Array]:
    """[K] lists: the likeliest tokens, where they are recorded, and their probabilities."""
    listed = np.arange(tokens.shape[1]) < widths[:, None]
    ends = pa.array(np.concatenate([[0], np.cumsum(widths)]).astype(np.int32))
    with_ids = given & ~np.any(tokens[listed] == NO_TOKEN)
    for values, kind, known in ((tokens, np.int32, with_ids), (shares, np.float32, given)):
        yield pa.ListArray.from_arrays(ends, pa.array(values[listed].astype(kind)), mask=pa.array(~known))


def tables_of(history: History, name: str) -> dict[str, pa.Table]:
    """The tables by name, along the path on which the history stands."""
    every = [*Source(name, history).steps(history.steps)]
    return {
        name: pa.Table.from_batches(
            [rows for table, rows in every if table == name], schema_of(name)
        ).unify_dictionaries()
        for name in ("steps", "nodes", "finals", "parents")
    }
