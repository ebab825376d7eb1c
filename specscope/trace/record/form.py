"""FormNotes: what a request's form, or its least length, took away in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from specscope.trace.record.declared import Count, Parent, Probability, Told, Wire, empty
from specscope.trace.record.equal import ArrayEq
from specscope.trace.record.tree import Floats, Ints


@dataclass(frozen=True, eq=False)
class FormNotes(ArrayEq):
    """At the k nodes that the step came by: the root and the accepted path. Empty with lean evidence."""

    # ROOT, or a node
    node: Annotated[Ints, Wire("", Parent, "s", told=Told.ALWAYS)] = empty(np.int32)
    # the model's own mass on the tokens that were refused
    removed: Annotated[Floats, Wire("", Probability, "s", told=Told.ALWAYS)] = empty(np.float32)
    # drafts of a text that were refused before they were verified
    pruned: Annotated[int, Wire("", Count, told=Told.ALWAYS)] = 0
