"""Faults in what is drafted: the wrong tokens, or tokens that are not what q says they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.speculate.drafters import tree_builder
from specscope.speculate.drafters.base import NO_DRAFT, Draft
from specscope.speculate.drafters.ngram import NgramDrafter, distinct, trie
from specscope.speculate.drafters.tree_builder import StaticTreeBuilder
from specscope.speculate.draws import Draw, draw_siblings
from specscope.trace.record.tree import ROOT, DraftTree
from tests.faults.fault import Fault


def shifted_lookup(by: int):
    """Prompt lookup that goes on `by` tokens too late (too early where it is negative)."""

    def install(patch, engine):
        def proceed(self, context, index):
            tokens = context.tokens
            for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
                ends = (end + by for end in index.ends(size) if end + by < len(tokens))
                if found := distinct((tokens[end : end + self.depth] for end in ends), self.width):
                    return Draft(trie(found))
            return NO_DRAFT

        patch.setattr(NgramDrafter, "_continue", proceed)

    return install


def shifted_chain(patch, engine):
    """A drafter's first output is taken for the root that it was given: everything comes one place too early."""
    finish = StaticTreeBuilder.finish

    def late(self):
        draft, places = finish(self)
        token = [*draft.tree.token[1:].tolist(), int(draft.tree.token[-1])]
        return dataclasses.replace(draft, tree=DraftTree.build(token, draft.tree.parent.tolist())), places

    patch.setattr(StaticTreeBuilder, "finish", late)


def placeholders(patch, engine):
    """Drafts are padded to their full length with token 0, and the padding is verified."""
    proceed = NgramDrafter._continue

    def padded(self, context, index):
        draft = proceed(self, context, index)
        chain = draft.tree.token.tolist()[: self.depth - 2]
        return Draft(DraftTree.build(chain + [0] * (self.depth - len(chain)), range(-1, self.depth - 1)))

    patch.setattr(NgramDrafter, "_continue", padded)


def other_map(change):
    """The map from draft tokens to the target's is `change` of what it is."""

    def install(patch, engine):
        patch.setattr(engine.drafter.runner, "d2t", change(engine.drafter.runner.d2t))

    return install


def q_of_another_temperature(factor: float):
    """Drafts are drawn from q; what is recorded and judged by is q at `factor` times the temperature."""

    def install(patch, engine):
        take = StaticTreeBuilder.take

        def changed(self, q, drawn):
            told = [(row.log() / factor).softmax(-1) for row in q]
            pairs = zip(told, drawn, strict=True)
            again = [[d._replace(prob=float(row[d.token]) if d.prob > 0 else 0.0) for d in one] for row, one in pairs]
            take(self, told, again)

        patch.setattr(StaticTreeBuilder, "take", changed)

    return install


def likeliest_for_drawn(patch, engine):
    """Drafts are the likeliest tokens of q; they are recorded and judged as drawn from it."""
    take = StaticTreeBuilder.take

    def likeliest(self, q, drawn):
        take(self, q, [[Draw(int(row.argmax()), float(row.max()), 1.0, 0.0, 0.0)] for row in q])

    patch.setattr(StaticTreeBuilder, "take", likeliest)


def without_q(patch, engine):
    """q is lost on its way: what was sampled is judged as deterministic."""
    finish = StaticTreeBuilder.finish

    def bare(self):
        draft, places = finish(self)
        return dataclasses.replace(draft, q={}, tree=_deterministic(draft.tree)), places

    patch.setattr(StaticTreeBuilder, "finish", bare)


def _deterministic(tree: DraftTree) -> DraftTree:
    return DraftTree.build(tree.token.tolist(), tree.parent.tolist())


def draws_beside(patch, engine):
    """The search in q's cumulative sum ends one token too early, and q is read at that token."""

    def beside(rows, coins):
        tokens, probs, margins, lows = draw_siblings(rows, coins)
        for row, some, shares, ends in zip(rows.numpy(), tokens, probs, lows, strict=True):
            for child, token in enumerate(some):
                before = [t for t in np.flatnonzero(row[:token]).tolist() if t not in some]
                if before and shares[child] > 0:
                    some[child], shares[child] = before[-1], float(row[before[-1]])
                    ends[child] -= shares[child]
        return tokens, probs, margins, lows

    patch.setattr(tree_builder, "draw_siblings", beside)


def sorted_siblings(patch, engine):
    """Siblings are drawn, then tried in the order of their q."""
    take = StaticTreeBuilder.take

    def by_q(self, q, drawn):
        take(self, q, [sorted(one, key=lambda draw: -draw.prob) for one in drawn])

    patch.setattr(StaticTreeBuilder, "take", by_q)


def pruned_siblings(patch, engine):
    """Of what was drawn the unlikely leaves are dropped."""
    finish = StaticTreeBuilder.finish

    def pruned(self):
        draft, places = finish(self)
        tree = draft.tree
        inner = set(tree.parent.tolist())
        kept = [i for i in range(len(tree)) if i in inner or tree.q[i] > 0.15]
        return _only(draft, kept), places[kept]

    patch.setattr(StaticTreeBuilder, "finish", pruned)


def _only(draft: Draft, kept: list[int]) -> Draft:
    """The draft with these nodes alone; each one's parent is among them."""
    tree, place = draft.tree, {old: new for new, old in enumerate(kept)} | {ROOT: ROOT}
    parent = np.array([place[int(tree.parent[i])] for i in kept], dtype=np.int32)
    less = DraftTree(tree.token[kept], parent, tree.q[kept], tree.drawn[kept])
    above = set(parent.tolist())
    q = {place[node]: row for node, row in draft.q.items() if node in place and place[node] in above}
    notes: Any = draft.notes
    if notes is not None:
        names = [name for name in ("prob", "score", "draw_margin", "coin", "low") if len(getattr(notes, name))]
        notes = dataclasses.replace(notes, **{name: getattr(notes, name)[kept] for name in names})
    return dataclasses.replace(draft, tree=less, q=q, notes=notes)


FAULTS = [
    Fault("lookup one late", Cause.DRAFT_POSITION, shifted_lookup(1), "ngram", "prompt lookup skips a token"),
    Fault("lookup one early", Cause.DRAFT_POSITION, shifted_lookup(-1), "ngram", "prompt lookup repeats the root"),
    Fault(
        "model one late", Cause.DRAFT_POSITION, shifted_chain, "model chain", "the draft model's first token is lost"
    ),
    Fault("padding judged", Cause.DRAFT_PLACEHOLDERS, placeholders, "ngram", "drafts padded with token 0"),
    Fault(
        "map off by a row",
        Cause.DRAFT_VOCABULARY,
        other_map(lambda d2t: d2t.roll(1)),
        "eagle chain",
        "each draft token is mapped as its neighbour",
    ),
    Fault(
        "map left out",
        Cause.DRAFT_VOCABULARY,
        other_map(lambda d2t: torch.arange(len(d2t))),
        "eagle tree warm",
        "draft tokens are taken for the target's own",
    ),
    Fault(
        "q told warmer",
        Cause.Q_TEMPERATURE,
        q_of_another_temperature(1.6),
        "early chain warm",
        "q is recorded at 1.6 times the temperature of the draws",
    ),
    Fault(
        "q told colder",
        Cause.Q_TEMPERATURE,
        q_of_another_temperature(0.6),
        "early tree warm",
        "q is recorded at 0.6 times the temperature of the draws",
    ),
    Fault(
        "q not drawn from",
        Cause.Q_NOT_DRAWN,
        likeliest_for_drawn,
        "early chain warm",
        "the drafter takes its likeliest tokens beside a q as if it drew",
        rare=0,
    ),
    Fault("q lost", Cause.Q_DROPPED, without_q, "early tree warm", "sampled drafts are judged as deterministic"),
    Fault(
        "draws one token early",
        Cause.Q_NOT_DRAWN,
        draws_beside,
        "early chain warm",
        "the draw from q ends one token too early",
    ),
    Fault(
        "siblings by q",
        Cause.SIBLINGS_CHANGED,
        sorted_siblings,
        "early tree warm",
        "sampled siblings are sorted by q",
        60,
    ),
    Fault(
        "unlikely siblings dropped",
        Cause.SIBLINGS_CHANGED,
        pruned_siblings,
        "early tree warm",
        "sampled leaves with q of 0.15 and less are dropped",
    ),
]
