"""Where the target's path, with the final token, is in its draft tree, if it is there at all."""

from __future__ import annotations

import numpy as np

from specscope.analyze.verify.columns import Columns, Indices


def among_children(c: Columns, steps: Indices) -> Indices:
    """Of each of these steps, the child of the last accepted node that has the final token's id; -1: none."""
    span = _span(c)
    return _find(c.row * span + c.token, c.final_row[steps] * span + c.final[steps])


def on_branches(c: Columns, steps: Indices) -> Indices:
    """Of each of these steps, the first node whose whole path is the accepted tokens and the final one; -1: none.

    Two branches of a tree may begin with the same tokens. Nodes with the same path get the same number, level by level.
    """
    span, count = _span(c), len(c)
    path = np.zeros(len(c.token), np.int64)  # a number for each node's path; those of the roots are the steps
    key = np.zeros(len(c.token), np.int64)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(c.depth == depth)
        key[nodes] = _numbers(c, path)[c.row[nodes]] * span + c.token[nodes]
        found, place = np.unique(key[nodes], return_inverse=True)
        path[nodes] = count + place.reshape(-1)
        count += len(found)
    return _find(key, _numbers(c, path)[c.final_row[steps]] * span + c.final[steps])


def among_dropped(c: Columns, steps: Indices) -> Indices:
    """Of each of these steps, a number of 0 and up where re-ranking dropped the final token there; -1: it did not."""
    rows, tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for step, visit in enumerate(c.visits):
        notes = visit.part.notes
        if notes is not None and len(notes.dropped_token):
            below = notes.dropped_parent < len(visit.part.tree)  # not below another dropped one
            rows.append(c.root_row[step] + 1 + notes.dropped_parent[below].astype(np.int64))
            tokens.append(notes.dropped_token[below].astype(np.int64))
    token = np.concatenate(tokens)
    span = max(_span(c), int(token.max(initial=0)) + 1)
    return _find(np.concatenate(rows) * span + token, c.final_row[steps] * span + c.final[steps])


def _span(c: Columns) -> int:
    """More than any token's id."""
    return 1 + max(int(c.token.max(initial=0)), int(c.final.max(initial=0)))


def _numbers(c: Columns, path: Indices) -> Indices:
    """[rows] the number of each row's path: a root's is its step."""
    numbers = np.zeros(c.rows, np.int64)
    numbers[c.root_row] = np.arange(len(c))
    numbers[c.own_row] = path
    return numbers


def _find(keys: Indices, wanted: Indices) -> Indices:
    """Of each wanted key, the first place where it is; -1: it is nowhere."""
    if not len(keys):
        return np.full(len(wanted), -1)
    known, first = np.unique(keys, return_index=True)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, first[at], -1)
