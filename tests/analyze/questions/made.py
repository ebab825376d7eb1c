"""Decode steps made by hand: every token, outcome and figure is given, so every answer can be counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import DraftNotes, ParentNotes, RequestInfo, RequestStep
from tests.analyze.histories import RUN, history, record
from tests.support import records as build
from tests.support.records import floats, ints

PROMPT = 10  # tokens


def decode(
    tokens: Sequence[int] = (),
    path: Sequence[int] = (),
    rejected: Sequence[int] = (),
    final: int = 99,
    *,
    own: Sequence[float] | None = None,
    parents: ParentNotes | None = None,
    dropped: Sequence[tuple[int, int]] = (),
    request: str = "a",
    index: int = 0,
    output: int = 0,
) -> RequestStep:
    """A chain. `own`: the drafter's p; `dropped`: (token, parent)."""
    n = len(tokens)
    tree = build.chain(tokens)
    kind = build.kind_of(tree.parent.tolist(), path)
    verdict = build.verdict(build.outcomes(n, path, rejected), path, final, kind, q_trial=tree.q, final_coin=0.0)
    notes = None
    if own is not None:
        notes = DraftNotes(
            floats(own), floats(np.zeros(n)), ints([t for t, _ in dropped]), ints([a for _, a in dropped]),
            floats(np.zeros(len(dropped))),
        )  # fmt: skip
    return RequestStep(
        request, index, PROMPT + output - 1, 0, "made", tree, verdict, len(path) + 1, notes, parents=parents
    )


def noted(
    nodes: Sequence[int],
    tree_size: int,
    top: Sequence[Sequence[int]],
    top_p: Sequence[Sequence[float]],
    raw_p: Sequence[float],
    **more: Sequence,
) -> ParentNotes:
    """What the target (and a drafter that is a model) gave at these parents."""
    choice = [row[0] for row in top]
    return build.parents(nodes, tree_size, top=top, top_p=top_p, raw_p=raw_p, choice=choice, **more)


def run_of(parts: Sequence[RequestStep], kinds: dict[str, str] | None = None, **change: object) -> History:
    """One engine step each, in which the request has its next index; every request is admitted with the first."""
    names = dict.fromkeys(part.request for part in parts)
    infos = tuple(
        RequestInfo(
            name, 0, 0, "", np.zeros(PROMPT, np.int32), SamplingParams(), {"kind": kinds[name]} if kinds else {}
        )
        for name in names
    )
    index = dict.fromkeys(names, 0)
    records = []
    for number, part in enumerate(parts):
        numbered = dataclasses.replace(part, index=index[part.request])
        index[part.request] += 1
        records.append(record(number, [numbered], admitted=infos if not number else ()))
    return history(records, run=dataclasses.replace(RUN, **change))
