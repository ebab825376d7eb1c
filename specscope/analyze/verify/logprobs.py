"""The log-probabilities that were handed out: each is its token's own, in the target's p before any rule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.fields import holding, joined, lengths, padded
from specscope.analyze.findings import Finding, Unit
from specscope.analyze.verify.exact import check_each
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.tree import Bools, Doubles

ERROR = 1e-3  # of a log-probability in float32 over a whole vocabulary
TINY = 1e-6  # a raw probability below is stored with few digits


def log_probabilities(c: Columns) -> Finding:
    """Each is that of its token among the likeliest, and of the raw p that was recorded where it was tried or drawn."""
    counts = lengths(c.picked, "logprobs", "logprob")
    step = np.repeat(np.arange(len(c)), counts)
    place = np.arange(len(step)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0 is behind the root
    on_path = place < c.depth_reached[step]
    path = np.append(c.path, 0)[np.where(on_path, (np.cumsum(c.depth_reached) - c.depth_reached)[step] + place, -1)]
    node = np.where(on_path, c.start[step] + path, -1)
    token = np.where(on_path, np.append(c.token, 0)[node], c.final[step])
    logprob = joined(c.picked, "logprobs", "logprob", np.float64)
    top = padded(c.picked, "logprobs", "top", np.int64, NO_TOKEN)
    top_logprob = padded(c.picked, "logprobs", "top_logprob", np.float64, -np.inf)
    raw = _raw(c, node, c.final_row[step], token)
    raw[holding(c.picked, "form")[step]] = np.nan  # there raw p may be what the form left of it
    listed = (top == token[:, None]) & (token != NO_TOKEN)[:, None]
    own = np.where(listed.any(axis=1), np.where(listed, top_logprob, -np.inf).max(axis=1, initial=-np.inf), np.nan)
    least = np.where(np.isfinite(top_logprob), top_logprob, np.inf).min(axis=1, initial=np.inf)
    problems: tuple[tuple[Bools, Callable[[int], str]], ...] = (
        (~np.isfinite(logprob) | (logprob > ERROR), lambda i: f"{logprob[i]:.6g} is no log-probability"),
        (np.abs(logprob - own) > ERROR, lambda i: f"{logprob[i]:.6g}, and {own[i]:.6g} in its list of the likeliest"),
        (np.isnan(own) & (logprob > least + ERROR), lambda i: f"{logprob[i]:.6g} is above the likeliest's"),
        (np.exp(top_logprob).sum(axis=1) > 1 + ERROR, lambda i: "the likeliest have more than 1 in all"),
        (_unlike(logprob, raw), lambda i: f"{logprob[i]:.6g}, the target's raw p is {raw[i]:.6g}"),
    )
    bad = np.any([wrong for wrong, _ in problems], axis=0) if len(step) else np.zeros(0, np.bool_)
    return check_each(
        "log-probabilities",
        "every log-probability is its token's own",
        bad,
        np.ones(len(step), np.bool_),
        Unit("token", lambda i: c.at_step(int(step[i]))),
        lambda i: next(f"token {token[i]}: {text(i)}" for wrong, text in problems if wrong[i]),
        note="" if len(step) else "no log-probabilities were asked for",
    )


def _raw(c: Columns, node: Indices, final_row: Indices, token: Indices) -> Doubles:
    """[E] the target's raw p of each emitted token, where it was recorded; else NaN. node: -1 for final tokens."""
    e = c.parents
    raw = np.full(len(token), np.nan)
    drafted = node >= 0
    there = drafted & (np.append(e.at_node, -1)[node] >= 0)
    raw[there] = e.raw_p[node[there]]
    parent = e.at_row[final_row] if len(e) else np.full(len(token), -1)
    if e.top.shape[1]:
        same = (e.top[parent] == token[:, None]) & (~drafted & (parent >= 0))[:, None]
        raw = np.where(same.any(axis=1), np.where(same, e.top_p[parent], 0).max(axis=1, initial=0), raw)
    return raw


def _unlike(logprob: Doubles, raw: Doubles) -> Bools:
    """[E] whether it is not the logarithm of a recorded p."""
    with np.errstate(divide="ignore", invalid="ignore"):
        unlike: Bools = (raw > TINY) & (np.abs(logprob - np.log(raw)) > ERROR)
    return unlike
