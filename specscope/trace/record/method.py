"""MethodNotes: what drafters of some methods tell besides their tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from specscope.trace.record.declared import Count, Name, Probability, Wire, empty
from specscope.trace.record.equal import ArrayEq
from specscope.trace.record.tree import Floats, Ints

TEXTS, MODELS = ("suffix", "ngram"), ("eagle", "draft_model")  # in older captures one of each may draft together
MODEL_NAMES = {"eagle": "head", "draft_model": "draft model"}
MODEL, TEXT, BOTH = 0, 1, 2
SOURCES = ("model", "text", "both")  # who drafted a node, by these numbers
Source = Annotated[int, Meta(ge=0, lt=len(SOURCES), title="0, 1 or 2")]


@dataclass(frozen=True, eq=False)
class MethodNotes(ArrayEq):
    """Of one tree of n nodes. What a method does not have is empty, 0, "" or False. Filled by drafters that look into
    texts, and by other engines' witnesses.

    A block drafter (DFlash, DSpark, P-EAGLE) drafts all depths in one pass, and may say how sure it is of each node.
    With an adaptive budget fewer are verified than were drafted: the rest are not in the tree. An MTP head has modules,
    each for a depth. Suffix decoding goes on as a text did that it has seen. Two that drafted together, in older
    captures, say of each node whether the model drafted it, the text, or both. Their confidence is the chance that was
    expected.
    """

    # that a node is accepted
    confidence: Annotated[Floats, Wire("", Probability, "n?")] = empty(np.float32)
    # which module drafted it, from 0
    module: Annotated[Ints, Wire("", Count, "n?")] = empty(np.int32)
    # of SOURCES, where two draft together
    source: Annotated[Ints, Wire("", Source, "n?")] = empty(np.int32)
    one_pass: Annotated[bool, Wire()] = False  # all depths came from one pass
    unverified: Annotated[int, Wire("", Count)] = 0  # drafts beyond the tree that were not verified
    match_length: Annotated[int, Wire("", Count)] = 0  # tokens of the context that were found
    match_count: Annotated[int, Wire("", Count)] = 0  # how often
    match_source: Annotated[str, Wire("", Name | None)] = ""  # where: the prompt, the request's output, other requests

    def source_of(self, node: int) -> str:
        """Who drafted a node: model, text or both; "" where one drafter works alone."""
        return SOURCES[self.source[node]] if len(self.source) else ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is told."""
        return self == MethodNotes()


def text_part(drafter: str) -> str:
    """The part of our drafter that searches the text: suffix or ngram, alone or combined; "" for none."""
    name = drafter.partition("+")[0]
    return name if name in TEXTS else ""


def model_part(drafter: str) -> str:
    """The part of our drafter that runs a model: eagle or draft_model, alone or combined; "" for none."""
    name = drafter.rpartition("+")[2]
    return name if name in MODELS else ""
