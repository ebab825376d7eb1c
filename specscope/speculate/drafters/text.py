"""Drafters that look into the text alone: prompt lookup and suffix decoding. Deterministic: q is a point mass.

`ngram` (Saxena 2023; vLLM's): what followed the last few tokens when they occurred before.

`suffix` (Oliaro et al. 2024, arXiv 2411.04975, section 3): for each length of suffix that occurred, the tree of its
continuations is grown by the likeliest path first, where a path is as likely as the share of occurrences that went on
so; a suffix of p tokens may bring FACTOR * p nodes, since a long match is followed the longest. Of these trees the one
is taken that is expected to have the most tokens accepted. Occurrences are looked for in the request's own prompt and
output, by the places of each pair of tokens, the latest MOST of them: memory is bounded by the length of the text.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specscope.speculate.allowed import allows
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft, Drafter
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.tree import ROOT, DraftTree


def pruned(draft: Draft, context: Context) -> Draft:
    """The nodes that may come, each behind its own path. Of a tree without q: deterministic."""
    if context.allowed is None or not len(draft.tree):
        return draft
    output, tree, kept = context.tokens[context.prompt_len :], draft.tree, list[int]()
    for node, above in enumerate(tree.parent.tolist()):
        if above == ROOT or above in kept:
            *path, token = tree.token[tree.path_to(node)].tolist()
            rows = context.allowed.rows(output, [path])
            if rows is None or allows(rows[0], token):
                kept.append(node)
    if len(kept) == len(tree):
        return draft
    place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
    method = draft.method
    if method is not None and len(method.confidence):
        method = replace(method, confidence=method.confidence[kept])
    left = DraftTree.build(tree.token[kept].tolist(), [place[int(tree.parent[node])] for node in kept])
    return replace(draft, tree=left, method=method if kept else None, pruned=len(tree) - len(kept))


class TextDrafter(Drafter, ABC):
    """Drafts what followed when the text's end occurred before. Deterministic: q is a point mass."""

    def __init__(self, nodes: int, depth: int, new_index: Callable[[], Any]) -> None:
        """`new_index`: an index of an empty text."""
        self.max_nodes, self.max_depth, self._new_index = nodes, depth, new_index
        self._indices: dict[str, Any] = {}  # by request, of its text as it was seen last

    @abstractmethod
    def _continue(self, context: Context, index: Any) -> Draft:  # noqa: ANN401
        """What followed the end of a text that the index has taken in."""

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        drafts = []
        for context in contexts:
            index = self._indices.setdefault(context.request, self._new_index())
            index.grow(context.tokens)
            drafts.append(pruned(self._continue(context, index), context))
        return drafts

    def rewind(self, request: str, tokens: int) -> bool:
        self.release(request)
        return True

    def release(self, request: str) -> None:
        self._indices.pop(request, None)


class NgramIndex:
    """For each n-gram its last occurrences that were followed by something else each time, at most `width` of them.

    An occurrence is named by its end, the index past its last token. An end is taken in once the `depth` tokens that
    follow it are there, so that what follows two ends is the same or not for good; the few ends after that are looked
    at one by one. So a look costs the same however long the text is, and however often it repeats itself.
    """

    def __init__(self, depth: int, width: int, sizes: range) -> None:
        self.depth, self.width, self.sizes = depth, width, sizes
        self._next = sizes.start  # the first end that was not taken in
        self._text = array("i")
        self._ends: dict[bytes, tuple[int, ...]] = {}  # by the n-gram's tokens, four bytes each; latest first

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the whole text so far; it begins with what was taken in before."""
        self._text.extend(tokens[len(self._text) :])
        for end in range(self._next, len(tokens) - self.depth + 1):
            follows = self._text[end : end + self.depth]
            for size in range(self.sizes.start, min(self.sizes.stop, end + 1)):
                gram = self._text[end - size : end].tobytes()
                others = [e for e in self._ends.get(gram, ()) if self._text[e : e + self.depth] != follows]
                self._ends[gram] = (end, *others)[: self.width]
            self._next = end + 1

    def ends(self, size: int) -> Iterator[int]:
        """Earlier ends of the last `size` tokens, latest first; of those with one continuation only the latest."""
        text = self._text
        suffix = text[-size:]
        for end in range(len(text) - 1, max(len(text) - self.depth, size - 1), -1):
            if text[end - size : end] == suffix:
                yield end
        yield from self._ends.get(suffix.tobytes(), ())


class NgramDrafter(TextDrafter):
    """Continues the most recent earlier occurrences of the longest suffix that has one.

    `width` 1 gives a chain; more give a tree of the most recent distinct continuations, most recent first. They
    share their common beginnings.
    """

    name = "ngram"

    def __init__(self, depth: int = 5, width: int = 1, longest: int = 4, shortest: int = 2) -> None:
        super().__init__(depth * width, depth, lambda: NgramIndex(depth, width, range(shortest, longest + 1)))
        self.depth, self.width, self.longest, self.shortest = depth, width, longest, shortest

    def _continue(self, context: Context, index: NgramIndex) -> Draft:
        tokens = context.tokens
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            if continuations := distinct((tokens[end : end + self.depth] for end in index.ends(size)), self.width):
                return Draft(trie(continuations), method=MethodNotes(match_length=size))
        return NO_DRAFT


def distinct(continuations: Iterable[Sequence[int]], width: int) -> list[Sequence[int]]:
    """The first `width` that are not a beginning of an earlier one."""
    unique: list[Sequence[int]] = []
    for tokens in continuations:
        if not any(other[: len(tokens)] == tokens for other in unique):
            unique.append(tokens)
            if len(unique) == width:
                break
    return unique


def trie(sequences: Sequence[Sequence[int]]) -> DraftTree:
    """Sequences as a tree that shares common beginnings, breadth first, earlier sequences first."""
    node_of: dict[tuple[int, ...], int] = {}
    token: list[int] = []
    parent: list[int] = []
    for depth in range(max(map(len, sequences), default=0)):
        for sequence in sequences:
            path = tuple(sequence[: depth + 1])
            if len(path) == depth + 1 and path not in node_of:
                node_of[path] = len(token)
                token.append(path[-1])
                parent.append(node_of[path[:-1]] if depth else ROOT)
    return DraftTree.build(token, parent)


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
        differ = lambda size: self.tokens[end - size : end] != suffix[len(suffix) - size :]  # noqa: E731
        return SHORTEST + bisect_left(range(SHORTEST + 1, min(end, len(suffix)) + 1), True, key=differ)


class SuffixDrafter(TextDrafter):
    """Drafts the likeliest continuations of the longest suffixes, as a tree."""

    name = "suffix"

    def __init__(self, nodes: int = 16, depth: int = 16) -> None:
        super().__init__(nodes, min(depth, nodes), Text)

    def _continue(self, context: Context, index: Text) -> Draft:
        best, most, match = list[tuple[int, int, int]](), 0.0, (0, list[int]())
        for size, places in index.occurrences().items():  # the longest first
            nodes = min(self.max_nodes, int(FACTOR * size))
            if min(nodes, self.max_depth) <= most:  # shares of a level add up to 1: no shorter match has more
                break
            grown = grow(index, places, nodes, self.max_depth)
            # Tokens that are expected to be accepted: the sum of the shares, divided once, so that equals are equal.
            expected = sum(count for _, _, count in grown) / len(places)
            if expected > most:  # of equals the longer match
                best, most, match = grown, expected, (size, places)
        if not best:
            return NO_DRAFT
        (size, places), (tokens, parents, counts) = match, zip(*best, strict=True)
        found = {"the prompt": min(places) <= context.prompt_len, "the output": max(places) > context.prompt_len}
        method = MethodNotes(
            confidence=(np.array(counts) / len(places)).astype(np.float32),
            match_length=size,
            match_count=len(places),
            match_source=", ".join(name for name, yes in found.items() if yes),
        )
        return Draft(DraftTree.build(tokens, parents), method=method)


def grow(text: Text, places: Sequence[int], nodes: int, depth: int) -> list[tuple[int, int, int]]:
    """The likeliest continuations of these occurrences: `nodes` at most, `depth` deep at most.

    Of each node its token, its parent, and how many of the occurrences went down to it.
    """
    grown: list[tuple[int, int, int]] = []
    heap: list[tuple[int, int, int, int, int, list[int]]] = []  # count (negative), age, token, parent, depth, places

    def add(here: Sequence[int], parent: int, deep: int) -> None:
        follows: dict[int, list[int]] = {}
        for end in here:
            if end < len(text):
                follows.setdefault(text.tokens[end], []).append(end + 1)
        for token, on in follows.items():  # in the order in which they were met: latest first
            if len(on) >= LEAST * len(places):
                heapq.heappush(heap, (-len(on), len(heap) + len(grown), token, parent, deep, on))

    add(places, ROOT, 1)
    while heap and len(grown) < nodes:
        count, _, token, parent, deep, on = heapq.heappop(heap)
        grown.append((token, parent, -count))
        if deep < depth:
            add(on, len(grown) - 1, deep + 1)
    return grown
