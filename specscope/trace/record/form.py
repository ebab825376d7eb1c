"""FormNotes: what a request's form, or its least length, took away in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specscope.trace.record.equal import ArrayEq
from specscope.trace.record.tree import Floats, Ints


@dataclass(frozen=True, eq=False)
class FormNotes(ArrayEq):
    """At the k nodes that the step came by: the root and the accepted path. Empty with lean evidence."""

    node: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # [k] ROOT, or a node
    # [k] the model's own mass on the tokens that were refused
    removed: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    pruned: int = 0  # drafts of a text that were refused before they were verified
