"""Where the target's path, with the final token, is in its draft tree, if it is there at all."""

from __future__ import annotations

import numpy as np

from specscope.analyze.evidence.arrays import Indices, join
from specscope.analyze.evidence.columns import Columns


def among_children(c: Columns, steps: Indices, token: Indices) -> Indices:
    """Of each of these steps, the child of the last accepted node that has this token [steps]; -1: none."""
    span = _span(c)
    return _find(c.row * span + c.token, c.final_row[steps] * span + token)


def on_branches(c: Columns, steps: Indices, token: Indices) -> Indices:
    """Of each of these steps, the first node whose whole path is the accepted tokens and this one; -1: none.

    Two branches of a tree may begin with the same tokens. Nodes with the same path get the same number, level by level.
    """
    span, count = _span(c), len(c)
    path = np.zeros(len(c.token), np.int64)  # a number for each node's path; those of the roots are the steps
    key = np.zeros(len(c.token), np.int64)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(c.depth == depth)
        above = c.above[nodes]
        key[nodes] = np.where(above < 0, c.step[nodes], path[above]) * span + c.token[nodes]
        found, place = np.unique(key[nodes], return_inverse=True)
        path[nodes] = count + place.reshape(-1)
        count += len(found)
    last = c.last[steps]
    return _find(key, np.where(last < 0, steps, path[last]) * span + token)


def among_dropped(c: Columns, steps: Indices, token: Indices) -> Indices:
    """Of each of these steps, a number of 0 and up where re-ranking dropped this token there; -1: it did not."""
    drafted = [(step, notes) for step, visit in enumerate(c.visits) if (notes := visit.part.notes) is not None]
    sizes = [len(notes.dropped_token) for _, notes in drafted]
    step = np.repeat(np.array([step for step, _ in drafted], np.int64), sizes)
    dropped = join([notes.dropped_token for _, notes in drafted], np.int64)
    parent = join([notes.dropped_parent for _, notes in drafted], np.int64)
    below = parent < np.diff(c.start)[step]  # a node, and not another dropped one
    rows, dropped = c.root_row[step[below]] + 1 + parent[below], dropped[below]
    span = max(_span(c), int(dropped.max(initial=0)) + 1)
    return _find(rows * span + dropped, c.final_row[steps] * span + token)


def _span(c: Columns) -> int:
    """More than any token's id."""
    choice = int(c.parents.choice.max(initial=0))
    return 1 + max(int(c.token.max(initial=0)), int(c.final.max(initial=0)), choice)


def _find(keys: Indices, wanted: Indices) -> Indices:
    """Of each wanted key, the first place where it is; -1: it is nowhere."""
    if not len(keys):
        return np.full(len(wanted), -1)
    known, first = np.unique(keys, return_index=True)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, first[at], -1)
