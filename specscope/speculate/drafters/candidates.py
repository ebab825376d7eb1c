"""Candidates: what a text and a model drafted for one request, as one tree; and which of it is worth verifying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specscope.speculate.drafters.base import Draft
from specscope.speculate.sizing.acceptance import OTHERS, PRIOR, UNSEEN, CandidateHistory, code, model_level, text_level
from specscope.trace.record.method import BOTH, MODEL, TEXT, MethodNotes
from specscope.trace.record.records import DraftNotes
from specscope.trace.record.tree import ROOT, DraftTree, Ints

WORTH = 0.07  # a candidate that is reached and accepted less often is not verified: a row costs more than it brings


@dataclass
class Candidates:
    """Nodes by their paths, parents first: the text's in their order, then those that only the model has."""

    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    of_text: list[int] = field(default_factory=list)  # each one's node in the text's tree, or -1
    of_model: list[int] = field(default_factory=list)  # and in the model's
    kind: list[int] = field(default_factory=list)  # what both say of it: acceptance.code
    chance: list[float] = field(default_factory=list)  # that it and all above it are accepted
    outcomes: list[tuple[int, bool]] = field(default_factory=list)  # filled by `came`

    @staticmethod
    def merge(
        text: Draft, model: Draft, acceptance: CandidateHistory, beforehand: Sequence[float] = PRIOR
    ) -> Candidates:
        """Both trees as one; what both have is one node. `beforehand`: what is known of each kind of candidate."""
        merged = Candidates()
        places: dict[tuple[int, int], int] = {}
        merged._add(text.tree, places, merged.of_text, merged.of_model)
        merged._add(model.tree, places, merged.of_model, merged.of_text)
        of_text, of_model = _text_levels(text), _model_levels(model)
        looked = (merged._parents(merged.of_text), merged._parents(merged.of_model))
        for above, text_node, model_node in zip(merged.parent, merged.of_text, merged.of_model, strict=True):
            says_text = of_text[text_node] if text_node >= 0 else OTHERS if above in looked[0] else UNSEEN
            says_model = of_model[model_node] if model_node >= 0 else OTHERS if above in looked[1] else UNSEEN
            kind = code(says_text, says_model)
            merged.kind.append(kind)
            merged.chance.append(acceptance.chance(kind, beforehand) * (1.0 if above == ROOT else merged.chance[above]))
        return merged

    def _add(self, tree: DraftTree, places: dict[tuple[int, int], int], mine: list[int], other: list[int]) -> None:
        """Add a source's nodes. `places`: where each candidate is, by parent and token."""
        place = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
            key = place[parent], token
            if key not in places:
                places[key] = len(self.token)
                self.parent.append(key[0])
                self.token.append(token)
                mine.append(-1)
                other.append(-1)
            place[node] = places[key]
            mine[places[key]] = node

    def _parents(self, nodes: Sequence[int]) -> set[int]:
        """Where a source looked: the parents of what it drafted."""
        return {above for above, node in zip(self.parent, nodes, strict=True) if node >= 0}

    @property
    def expected(self) -> float:
        """Tokens that would be accepted if all were verified."""
        return sum(self.chance)

    @property
    def first(self) -> float:
        """The chance that some child of the root is accepted."""
        return min(sum(c for c, above in zip(self.chance, self.parent, strict=True) if above == ROOT), 1.0)

    def came(self, tokens: Sequence[int]) -> None:
        """Note each candidate whose turn came: its kind, and whether it was the token. `tokens`: after the root."""
        depth = {ROOT: 0}
        for node, (token, above) in enumerate(zip(self.token, self.parent, strict=True)):
            place = depth.get(above)
            if place is not None and place < len(tokens):
                self.outcomes.append((self.kind[node], token == tokens[place]))
                if token == tokens[place]:
                    depth[node] = place + 1

    def best(self, count: int) -> list[int]:
        """The likeliest, the best first. Of equals the earlier: a parent is before its child."""
        return sorted(range(len(self.chance)), key=lambda node: (-self.chance[node], node))[:count]

    def worthy(self) -> int:
        """How many are worth a row where nobody says what one costs."""
        return sum(chance >= WORTH for chance in self.chance)

    def draft(self, chosen: Sequence[int], text: Draft, model: Draft) -> tuple[Draft, Ints]:
        """A tree of some of them, and for each of its nodes the one of the model's tree, or -1. int32 [n]."""
        left = sorted(set(range(len(self.token))) - set(chosen))
        place = {node: number for number, node in enumerate([*chosen, *left])} | {ROOT: ROOT}
        tree = DraftTree.build([self.token[i] for i in chosen], [place[self.parent[i]] for i in chosen])
        method = MethodNotes(
            confidence=np.array([self.chance[i] for i in chosen], np.float32),
            source=np.array([self._source(i) for i in chosen], np.int32),
            match_length=0 if text.method is None else text.method.match_length,
            match_count=0 if text.method is None else text.method.match_count,
            match_source="" if text.method is None else text.method.match_source,
        )
        behind = np.array([self.of_model[i] for i in chosen], np.int32)
        if model.notes is None:
            return Draft(tree, method=method), behind
        score = np.log(np.maximum(self.chance, 1e-30)).astype(np.float32)
        prob = model.notes.prob
        notes = DraftNotes(
            prob=np.array([prob[i] if i >= 0 else 0.0 for i in behind.tolist()], np.float32),
            score=score[list(chosen)],
            dropped_token=np.array([self.token[i] for i in left], np.int32),
            dropped_parent=np.array([place[self.parent[i]] for i in left], np.int32),
            dropped_score=score[left],
            cached=model.notes.cached,
            rows=model.notes.rows,
            fed_token=model.notes.fed_token,
            fed_position=model.notes.fed_position,
            fed_norms=model.notes.fed_norms,
        )
        return Draft(tree, notes=notes, method=method, row=model.row, levels=model.levels), behind

    def _source(self, node: int) -> int:
        return BOTH if self.of_text[node] >= 0 <= self.of_model[node] else TEXT if self.of_text[node] >= 0 else MODEL


def _text_levels(draft: Draft) -> list[int]:
    """How sure the text is of each node. Where it tells no shares, the first of siblings has all of them."""
    tree, method = draft.tree, draft.method
    match = 0 if method is None else method.match_length
    shares = [] if method is None else method.confidence.tolist()
    levels, seen = list[int](), set[int]()
    for node, (above, depth) in enumerate(zip(tree.parent.tolist(), tree.depth.tolist(), strict=True)):
        if shares:
            share = shares[node] / (1.0 if above == ROOT else shares[above])
        else:
            share = 0.0 if above in seen else 1.0
        seen.add(above)
        levels.append(text_level(share, match + depth - 1))
    return levels


def _model_levels(draft: Draft) -> list[int]:
    """How sure the model is of each node."""
    return [] if draft.notes is None else [model_level(prob) for prob in draft.notes.prob.tolist()]
