"""A run's request steps as the page has them: columns, in chunks of steps, each of which a browser decodes by itself.

Steps lie request by request. A chunk is a header in JSON, then its columns end to end. Of each column the first bytes
of all values come first, then the second ones (deflate then halves what floats take), and the whole is deflated. What
is the same everywhere stands in the header alone.

    [4 bytes: length of the header] {"columns": [[name, dtype, count, the value that all have or null]...], ...} ...
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import holding, lengths, numbered, numbers, widths, words
from specscope.analyze.evidence.columns import Columns
from specscope.trace.history.history import History
from specscope.trace.history.place import ratios
from specscope.trace.history.stats import StepCounts
from specscope.trace.history.totals import why_undrafted
from specscope.trace.history.wording import about_method, about_sizing
from specscope.trace.record.draft_vocabulary import draft_tokens
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, StepRecord
from specscope.trace.record.rules import MATCH, goes_by_a, is_lossy, looks_ahead, near, near_draw
from specscope.trace.run.packed import Picked

CHUNK = 512  # request steps
KINDS = (*(kind.value for kind in FinalKind), "prefill")
Array = NDArray[Any]
TYPES = {"u1": np.uint8, "u2": np.uint16, "i2": np.int16, "i4": np.int32, "f4": np.float32, "f8": np.float64}
# Bits of a step, and of a node
GREEDY, TELLS_P, FORCED_FINAL, NEAR_FINAL, HAS_PARENTS, HAS_NOTES, LOSSY, SAMPLED = (1 << bit for bit in range(8))
OUTCOME, ON_PATH, JUDGED, FORCED, NEAR, NEAR_DRAW = 3, 4, 8, 16, 32, 64


def packed(columns: Mapping[str, tuple[str, Array]], **more: object) -> bytes:
    """Columns, each of a type of TYPES, as bytes that the page decodes. `more`: goes into the header."""
    told, parts = list[tuple[str, str, int, float | None]](), list[bytes]()
    for name, (kind, values) in columns.items():
        flat = np.ascontiguousarray(values, TYPES[kind]).ravel()
        same = flat[0].item() if len(flat) and (flat == flat[0]).all() else None
        told.append((name, kind, len(flat), same))
        if len(flat) and same is None:
            parts.append(flat.view(np.uint8).reshape(len(flat), -1).T.tobytes())
    header = json.dumps({"columns": told, **more}, separators=(",", ":"), allow_nan=False).encode()
    return deflated(b"".join((len(header).to_bytes(4, "little"), header, *parts)))


def deflated(data: bytes) -> bytes:
    """As `deflate-raw` of a browser's DecompressionStream reads it."""
    compressor = zlib.compressobj(9, wbits=-15)
    return compressor.compress(data) + compressor.flush()


@dataclass(frozen=True)
class Steps:
    """All request steps on the path on which a history stands, request by request."""

    history: History
    parts: Sequence[RequestStep]
    records: Sequence[StepRecord]  # the engine's step of each
    first: Mapping[str, int]  # where each request begins

    @staticmethod
    def of(history: History) -> Steps:
        """Those of a history."""
        parts, records, first = list[RequestStep](), list[StepRecord](), dict[str, int]()
        for request in history.requests.values():
            first[request.id] = len(parts)
            parts += request.steps
            records += [history.steps[position] for position in request.engine_steps]
        return Steps(history, parts, records, first)

    def __len__(self) -> int:
        return len(self.parts)

    def chunks(self) -> Iterator[bytes]:
        for at in range(0, len(self), CHUNK):
            here = slice(at, at + CHUNK)
            yield _Chunk(self.history, self.parts[here], self.records[here]).packed()

    def overview(self) -> bytes:
        """What lists and the coloured output need of every step."""
        picked = Picked.of(self.parts)
        depths = [0 if (counts := StepCounts.of(part)) is None else counts.depth for part in self.parts]
        return packed(
            {
                "kind": ("u1", kinds(picked)),
                "accepted": ("u2", lengths(picked, "verdict", "path")),
                "nodes": ("u2", lengths(picked, "tree", "token")),
                "depth": ("u2", np.array(depths)),
                "emitted": ("u2", numbers(picked, "", "emitted")),
                "index": ("i4", numbers(picked, "", "index")),
                "engine": ("i4", np.array([record.step for record in self.records])),
            }
        )

    def output(self) -> bytes:
        """The output tokens of all steps, end to end."""
        tokens = [token for part in self.parts for token in part.output()]
        return packed({"token": ("i4", np.array(tokens, np.int64))})

    def vocabulary(self, kept: Mapping[str, Mapping[int, int]]) -> bytes:
        """What is known of each token: its bytes end to end, their lengths or -1, and its number for the drafter or -1.

        `kept`: how often each was drafted, tried and accepted in this run.
        """
        vocabulary, drafters = self.history.vocabulary, draft_tokens(self.history.run)
        known = {} if drafters is None else {token: number for number, token in enumerate(drafters.tolist())}
        tokens = sorted({*vocabulary.pieces, *kept.get("drafted", ()), *(() if vocabulary.pieces else known)})
        pieces = [vocabulary.pieces.get(token) for token in tokens]
        columns = {
            "token": ("i4", np.array(tokens, np.int64)),
            "special": ("u1", np.array([token in vocabulary.special for token in tokens])),
            "length": ("i4", np.array([-1 if piece is None else len(piece) for piece in pieces], np.int64)),
            "bytes": ("u1", np.frombuffer(b"".join(filter(None, pieces)), np.uint8)),
            **{name: ("i4", np.array([counts.get(each, 0) for each in tokens])) for name, counts in kept.items()},
        }
        if drafters is not None:
            columns["draft"] = ("i4", np.array([known.get(token, -1) for token in tokens]))
        return packed(columns)


def kinds(picked: Sequence[Picked]) -> Array:
    """[S] the place in KINDS of each step's final token."""
    return np.array([KINDS.index(kind or "prefill") for kind in words(picked, "verdict", "kind")], np.uint8)


class _Chunk:
    """Some request steps; `c` has those that were judged."""

    def __init__(self, history: History, parts: Sequence[RequestStep], records: Sequence[StepRecord]) -> None:
        self._history, self._parts, self._records = history, parts, records
        self._picked = Picked.of(parts)
        self._judged = np.flatnonzero(holding(self._picked, "verdict"))
        self.c = Columns([parts[row] for row in self._judged.tolist()])
        self._dtype = "" if history.run is None else history.run.dtype

    def packed(self) -> bytes:
        names = self._names()
        coded = {name: numbered(values) for name, values in names.items()}
        told = {name: list(dict.fromkeys(values)) for name, values in names.items()}
        columns = {
            **self._steps(),
            **{name: ("u2", codes) for name, codes in coded.items()},
            **self._nodes(),
            **self._tried(),
            **self._parents(),
            **self._dropped(),
        }
        return packed(columns, names=told)

    def _names(self) -> dict[str, list[str]]:
        """[S] of each step what has a name."""
        run, pairs = self._history.run, list(zip(self._parts, self._records, strict=True))
        return {
            "drafter": words(self._picked, "", "drafter"),
            "rule": [rule or "" for rule in words(self._picked, "verdict", "rule")],
            "undrafted": [why_undrafted(run, record, part) or "" for part, record in pairs],
            "sizing": [about_sizing(part) if part.sizing else "" for part in self._parts],
            "method": ["; ".join(about_method(part.method)) if part.method else "" for part in self._parts],
        }

    def _steps(self) -> dict[str, tuple[str, Array]]:
        """[S] each."""
        c, picked = self.c, self._picked
        with np.errstate(all="ignore"):  # what an engine computed may be no number
            final_coin = np.where(c.rule == MATCH, 0.0, c.final_coin)
            near_final = near_draw(final_coin, c.final_margin.astype(np.float64), self._dtype)
        tells_p = (c.final_p != 0) | c.forced_final
        uncertain = c.any_in_step(c.tried & ~np.isin(c.p_trial, (0, 1)))
        lossy = np.array([is_lossy(rule) for rule in c.rule.tolist()], np.bool_)
        flags = {
            GREEDY: np.isin(c.final_p, (0, 1)) & ~uncertain & tells_p,
            TELLS_P: tells_p,
            FORCED_FINAL: c.forced_final,
            NEAR_FINAL: near_final,
            HAS_PARENTS: holding(c.picked, "parents"),
            HAS_NOTES: holding(c.picked, "notes"),
            LOSSY: lossy,
            SAMPLED: c.any_in_step(c.sampled),
        }
        return {
            "kind": ("u1", kinds(picked)),
            "index": ("i4", numbers(picked, "", "index")),
            "engine": ("i4", np.array([record.step for record in self._records])),
            "context": ("i4", numbers(picked, "", "context_len")),
            "prefill": ("i4", numbers(picked, "", "prefill_tokens")),
            "emitted": ("u2", numbers(picked, "", "emitted")),
            "nodes": ("u2", lengths(picked, "tree", "token")),
            "dropped": ("u2", lengths(picked, "notes", "dropped_token")),
            "flags": ("u1", self._laid(np.sum([bit * known.astype(np.int64) for bit, known in flags.items()], axis=0))),
            "final": ("i4", self._laid(c.final)),
            **{name: ("f8", self._laid(getattr(c, name))) for name in ("final_p", "final_coin", "final_margin")},
            "final_target_p": ("f8", self._laid(c.parents.final_p)),
        }

    def _laid(self, values: Array) -> Array:
        """[S] what each judged step has; 0 of a prefill."""
        laid = np.zeros(len(self._parts), values.dtype)
        laid[self._judged] = values
        return laid

    def _nodes(self) -> dict[str, tuple[str, Array]]:
        """[N] each."""
        c, e = self.c, self.c.parents
        bits = {ON_PATH: c.on_path, JUDGED: c.by_own_coin, FORCED: c.forced, NEAR: self._near_ties()}
        with np.errstate(all="ignore"):
            bits[NEAR_DRAW] = near_draw(c.draft_coin, c.draw_margin, self._dtype)
        flags = c.outcome + sum(bit * known.astype(np.uint8) for bit, known in bits.items())
        told = {"node_flags": ("u1", flags), "source": ("u1", np.where(c.source < 0, 255, c.source))}
        drafted = told | _of(c, "i4", "token") | _of(c, "i2", "parent", "module") | _of(c, "u1", "drawn")
        return drafted | _of(c, "f4", "p", "q", "prob", "score", "confidence") | _of(e, "f4", "raw_p")

    def _near_ties(self) -> NDArray[np.bool_]:
        """[N] whether rounding could flip the decision on a node: Verdict.near_ties."""
        c = self.c
        by_a = np.array([goes_by_a(rule) for rule in c.rule.tolist()], np.bool_)[c.step]
        with np.errstate(all="ignore"):
            p, border = np.where(by_a, c.accept_prob, c.p_trial), np.where(by_a, c.coin, c.coin * c.q_trial)
            return np.asarray((c.margin < 1) & near(p, border, self._dtype))

    def _tried(self) -> dict[str, tuple[str, Array]]:
        """[T] of the nodes that were tried, what decided on them. The coin and a in full: they are compared."""
        c, tried = self.c, self.c.outcome != Outcome.UNTRIED
        of_nodes = _of(c, "f4", "p_trial", "q_trial") | _of(c, "f8", "accept_prob", "coin", "residual_mass", "margin")
        columns = {name: (kind, values[tried]) for name, (kind, values) in of_nodes.items()}
        ahead = np.flatnonzero([looks_ahead(rule) for rule in c.rule.tolist()])
        if len(ahead):
            of_path = np.ones((2, len(c.token)))
            for step in ahead.tolist():
                found = ratios(c.parts[step].tree, c.verdicts[step])
                of_path[:, c.start[step] : c.start[step + 1]] = found.parent, found.own
            columns |= {"path_parent": ("f8", of_path[0][tried]), "path_own": ("f8", of_path[1][tried])}
        return columns

    def _parents(self) -> dict[str, tuple[str, Array]]:
        """[S] how many were tried and noted; [K] of each what target and drafter gave there."""
        c, e = self.c, self.c.parents
        tops = {name: widths(c.picked, "parents", name) for name in ("top", "draft_top")}
        listed: dict[str, tuple[str, Array]] = {}
        for name, counts in tops.items():
            for column, kind in ((name, "i4"), (f"{name}_p", "f4")):
                values = getattr(e, column)
                listed[column] = kind, values[np.arange(values.shape[1]) < counts[:, None]]
        return {
            "noted": ("u2", self._laid(lengths(c.picked, "parents", "node"))),
            "at": ("i2", e.node),
            **{f"{name}s": ("u1", counts) for name, counts in tops.items()},
            **listed,
            **_of(e, "i4", "choice", "choice_rank"),
            **_of(e, "f4", "choice_p", "entropy", "q_entropy", "choice_q", "outside"),
        }

    def _dropped(self) -> dict[str, tuple[str, Array]]:
        """Tokens that re-ranking dropped and that the target wanted there: [D] the step, the parent, the token."""
        step, parent, token = list[int](), list[int](), list[int]()
        for row, part in zip(self._judged.tolist(), self.c.parts, strict=True):
            dropped = part.told("notes", "dropped_token")
            if dropped is None or not len(dropped):
                continue
            choices = part.told("parents", "choice")
            wanted = np.append([] if choices is None else choices, part.told("verdict", "token"))
            for place in np.flatnonzero(np.isin(dropped, wanted)).tolist():
                step.append(row)
                parent.append(part.told("notes", "dropped_parent").item(place))
                token.append(dropped.item(place))
        columns = {"dropped_step": ("u2", step), "dropped_parent": ("i2", parent), "dropped_token": ("i4", token)}
        return {name: (kind, np.array(values, np.int64)) for name, (kind, values) in columns.items()}


def _of(table: object, kind: str, *names: str) -> dict[str, tuple[str, Array]]:
    """Columns of a table of the evidence, as they are."""
    return {name: (kind, getattr(table, name)) for name in names}
