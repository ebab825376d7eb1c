"""Which drafted tokens are rejected most, and what the target took in their place: as values, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.table import NONE, Examples, Table, count, percent
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary, printable

TAKEN = 3  # tokens that a row names
TOKEN = 14  # characters of a cell at most


@dataclass(frozen=True)
class Share:
    count: int
    total: int

    @property
    def value(self) -> float | None:
        """None where the total is 0."""
        return self.count / self.total if self.total else None

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total, "share": self.value}


@dataclass(frozen=True)
class Count:
    token: int
    count: int


@dataclass(frozen=True)
class RejectedToken:
    token: int
    rejected: Share  # of the times it was tried
    taken: tuple[Count, ...]  # what the target put in its place, the commonest first
    examples: Examples  # clearest: where the drafter was surest of it


@dataclass(frozen=True)
class Rejections:
    """The rejections among all nodes that were judged."""

    rejected: Share  # of the nodes tried
    tokens: tuple[RejectedToken, ...]  # the most rejections first
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answers:
    steps: int  # decode steps that were looked at
    rejections: Rejections


def answer(history: History, request: str | None = None) -> Answers:
    """The answer over all requests on the path, or over one."""
    evidence = Evidence.of(history, request)
    return Answers(len(evidence.columns), rejections(evidence))


def rejections(evidence: Evidence) -> Rejections:
    if lacking := evidence.lacking(evidence.judged):
        return Rejections(Share(0, 0), (), lacking)
    c = evidence.columns
    tried, nodes = np.flatnonzero(evidence.judged), np.flatnonzero(evidence.judged & c.rejected)
    rows: list[RejectedToken] = []
    if len(nodes) and c.named[nodes].all():
        totals = dict(zip(*(each.tolist() for each in np.unique(c.token[tried], return_counts=True)), strict=True))
        nodes = nodes[np.argsort(c.token[nodes], kind="stable")]
        of_tokens = np.split(nodes, np.flatnonzero(np.diff(c.token[nodes])) + 1)
        rows = [_row(evidence, mine, totals[c.token.item(mine[0])]) for mine in of_tokens]
    rows.sort(key=lambda row: -row.rejected.count)
    return Rejections(Share(len(nodes), len(tried)), tuple(rows), evidence.notes)


def _row(evidence: Evidence, nodes: Indices, tried: int) -> RejectedToken:
    """Of one token. `nodes`: where it was rejected; `tried`: how often it was tried."""
    c, taken = evidence.columns, evidence.taken[nodes]
    tokens, counts = np.unique(taken[taken >= 0], return_counts=True)
    commonest = [Count(tokens.item(at), counts.item(at)) for at in np.argsort(-counts, kind="stable")[:TAKEN]]
    surest = nodes[np.argmax(np.nan_to_num(evidence.confidence[nodes], nan=-np.inf))]
    examples = Examples(c.at_node(nodes[0]), c.at_node(surest))
    return RejectedToken(c.token.item(nodes[0]), Share(len(nodes), tried), tuple(commonest), examples)


def tokens_table(answers: Answers, vocabulary: Vocabulary) -> Table:
    """The tokens as a table for a report and the screen, with what its rows are sorted by."""
    found = answers.rejections
    cells = [_cells(row, vocabulary) for row in found.tokens]
    total = f"{found.rejected.count:,} of {found.rejected.total:,} nodes tried were rejected"
    return Table(
        "Most rejected drafted tokens",
        ("token", "rejected", "tried", "share", "the target took"),
        tuple(tuple(text for text, _ in row) for row in cells),
        "share: rejected / tried.",
        words=frozenset(["token", "the target took"]),
        ranks={"tried": 4, "share": 2, "the target took": 1},
        values=[tuple(value for _, value in row) for row in cells],
        examples=[row.examples for row in found.tokens],
        notes=found.notes,
        summary=total if found.rejected.total else "",
    )


def _cells(row: RejectedToken, vocabulary: Vocabulary) -> list[tuple[str, float | str | None]]:
    """What each column shows, and what it is sorted by."""
    token, rejected = _shown(row.token, vocabulary), row.rejected
    taken = [f"{_shown(each.token, vocabulary)} ×{each.count:,}" for each in row.taken]
    return [
        (token, token),
        (count(rejected.count), rejected.count),
        (count(rejected.total), rejected.total),
        (percent(rejected.value), rejected.value),
        ("  ".join(taken) or NONE, taken[0] if taken else None),
    ]


def _shown(token: int, vocabulary: Vocabulary) -> str:
    text = vocabulary.show(token)
    text = text if len(text) <= TOKEN else text[: TOKEN - 1] + "…"
    return f"{printable(text)} #{token}" if vocabulary.pieces.get(token) is not None else f"#{token}"
