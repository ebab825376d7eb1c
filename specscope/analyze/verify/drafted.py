"""Drafted tokens against the drafter's reduced vocabulary: what it does not know it cannot draft."""

from __future__ import annotations

import numpy as np

from specscope.analyze.findings import Check, Result
from specscope.analyze.verify.columns import Columns
from specscope.analyze.verify.exact import found
from specscope.trace.draft_vocabulary import draft_tokens
from specscope.trace.method import TEXT
from specscope.trace.records import RunInfo

NAME, ABOUT = "draft vocabulary", "every drafted token is one that the drafter knows"


def draft_vocabulary(c: Columns, run: RunInfo | None) -> Check:
    """Skipped, with the reason, where no token is outside or the capture does not tell."""
    known = draft_tokens(run)
    if known is None:
        told = run is not None and bool(run.evidence)
        why = "the drafter's vocabulary is not reduced" if told else "the capture does not tell what the drafter knows"
        return Check(NAME, Result.SKIPPED, ABOUT, note=why)
    every = c.source != TEXT  # what a text drafts beside a model may be any token
    bad = every & ~np.isin(c.token, known)
    note = f"{len(known):,} tokens of the target"
    return found(NAME, ABOUT, bad, every, c.at_node, lambda i: f"token {c.token[i]} is not among them", note=note)
