"""Suffix decoding: what followed the longest suffixes of the text when they occurred before, by how often it did.

Oliaro et al. 2024 (arXiv 2411.04975), section 3: for each length of suffix that occurred, the tree of its continuations
is grown by the likeliest path first, where a path is as likely as the share of occurrences that went on so; a suffix of
p tokens may bring FACTOR * p nodes, since a long match is followed the longest. Of these trees the one is taken that is
expected to have the most tokens accepted. Occurrences are looked for in the request's own prompt and output.
Deterministic: q is a point mass.

A suffix tree would find them too, but takes a node or more a token. Here the places of each pair of tokens are kept,
and compared backwards from the latest MOST of them: memory is bounded by the length of the text, and a look by MOST.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.speculate.drafters.text_drafter import TextDrafter
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.tree import ROOT, DraftTree

FACTOR = 2.0  # nodes for each token that matched
LEAST = 0.1  # of the occurrences: a path that fewer went is not drafted
SHORTEST, LONGEST = 2, 64  # tokens of a suffix that are compared
MOST = 128  # occurrences of a pair that are looked at, the latest


class Text:
    """A growing text, with the places of each pair of tokens in it as a linked list, latest first.

    A token takes 8 bytes, and a pair that was not there before some 100 in a dictionary.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self._before = array("i")  # [tokens] the place before this one of the pair that ends here; 0 for none
        self._last: dict[bytes, int] = {}  # by pair: the index past its last occurrence

    def __len__(self) -> int:
        return len(self.tokens)

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the whole text so far; it begins with what was taken in before."""
        length = len(self.tokens)
        self.tokens.extend(tokens[length:])
        for end in range(length + 1, len(self.tokens) + 1):
            pair = self.tokens[max(end - 2, 0) : end].tobytes()
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = end

    def occurrences(self, longest: int = LONGEST) -> dict[int, list[int]]:
        """Where its last 2, 3, ... `longest` tokens occurred with something behind them: by how many, the most first.

        A place is the index past the last of them. Of a length that occurred as often as the next longer one only the
        longer is given. Later places come first; MOST are looked at.
        """
        suffix, places = self.tokens[-longest:], list[int]()
        end = self._before[-1] if len(suffix) >= SHORTEST else 0
        while end and len(places) < MOST:
            places.append(end)
            end = self._before[end - 1]
        sizes = [self._shared(end, suffix) for end in places]
        return {
            least: [place for place, size in zip(places, sizes, strict=True) if size >= least]
            for least in sorted(set(sizes), reverse=True)
        }

    def _shared(self, end: int, suffix: array[int]) -> int:
        """How many of the last tokens of `suffix` the text has before `end`; its last two are known to be there."""
        low, high = SHORTEST, min(end, len(suffix))
        if self.tokens[end - high : end] == suffix[len(suffix) - high :]:
            return high
        while high - low > 1:  # `low` are the same, `high` are not
            middle = (low + high) // 2
            same = self.tokens[end - middle : end] == suffix[len(suffix) - middle :]
            low, high = (middle, high) if same else (low, middle)
        return low


@dataclass(frozen=True)
class Grown:
    """Continuations of one suffix. `counts`: of its `total` occurrences, how many went down to each node."""

    total: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Tokens that are expected to be accepted: the sum of the shares, divided once, so that equals are equal."""
        return sum(self.counts) / self.total


class SuffixDrafter(TextDrafter):
    """Drafts the likeliest continuations of the longest suffixes, as a tree."""

    name = "suffix"

    def __init__(self, nodes: int = 16, depth: int = 16) -> None:
        super().__init__(nodes, min(depth, nodes))

    def _new_index(self) -> Text:
        return Text()

    def _continue(self, context: Context, index: Text) -> Draft:
        best, match = Grown(1), (0, list[int]())
        for size, places in index.occurrences().items():  # the longest first
            nodes = min(self.max_nodes, int(FACTOR * size))
            if min(nodes, self.max_depth) <= best.score:  # shares of a level add up to 1: no shorter match has more
                break
            grown = grow(index, places, nodes, self.max_depth)
            if grown.score > best.score:  # of equals the longer match
                best, match = grown, (size, places)
        size, places = match
        if not places:
            return NO_DRAFT
        found = {"the prompt": min(places) <= context.prompt_len, "the output": max(places) > context.prompt_len}
        method = MethodNotes(
            confidence=(np.array(best.counts) / best.total).astype(np.float32),
            match_length=size,
            match_count=len(places),
            match_source=", ".join(name for name, yes in found.items() if yes),
        )
        return Draft(DraftTree.build(best.tokens, best.parents), method=method)


def grow(text: Text, places: Sequence[int], nodes: int, depth: int) -> Grown:
    """The likeliest continuations of these occurrences: `nodes` at most, `depth` deep at most."""
    grown, total = Grown(len(places)), len(places)
    heap: list[tuple[int, int, int, int, list[int]]] = []  # count (negative), age, token, parent, places

    def add(here: Sequence[int], parent: int) -> None:
        follows: dict[int, list[int]] = {}
        for end in here:
            follows.setdefault(text.tokens[end], []).append(end + 1)
        for token, on in follows.items():  # in the order in which they were met: latest first
            if len(on) >= LEAST * total:
                heapq.heappush(heap, (-len(on), len(heap) + len(grown.tokens), token, parent, on))

    deep: list[int] = []
    add(places, ROOT)
    while heap and len(grown.tokens) < nodes:
        count, _, token, parent, on = heapq.heappop(heap)
        grown.tokens.append(token)
        grown.parents.append(parent)
        grown.counts.append(-count)
        deep.append(1 if parent == ROOT else deep[parent] + 1)
        further = [end for end in on if end < len(text)]
        if further and deep[-1] < depth:
            add(further, len(grown.tokens) - 1)
    return grown
