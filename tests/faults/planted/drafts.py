"""Faults in what is drafted: the wrong tokens, or tokens that are not what q says they are."""

import dataclasses
from typing import Any

import numpy as np
import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.speculate.drafters import tree_builder
from specscope.speculate.drafters.base import NO_DRAFT, Draft
from specscope.speculate.drafters.text import NgramDrafter, distinct, trie
from specscope.speculate.verify.distribution import Draw
from specscope.trace.record.tree import ROOT, DraftTree
from tests.faults.fault import Fault, altered, finished, replaced, taken


def shifted_lookup(by: int):
    """Prompt lookup that goes on `by` tokens too late (too early where it is negative)."""

    def shifted(proceed, self, context, index):
        tokens = context.tokens
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            ends = (end + by for end in index.ends(size) if end + by < len(tokens))
            if found := distinct((tokens[end : end + self.depth] for end in ends), self.width):
                return Draft(trie(found))
        return NO_DRAFT

    return replaced(NgramDrafter, "_continue")(shifted)


def shifted_chain(draft, places):
    """A drafter's first output is taken for the root that it was given: everything comes one place too early."""
    token = [*draft.tree.token[1:].tolist(), int(draft.tree.token[-1])]
    return dataclasses.replace(draft, tree=DraftTree.build(token, draft.tree.parent.tolist())), places


@replaced(NgramDrafter, "_continue")
def placeholders(proceed, self, context, index):
    """Drafts are padded to their full length with token 0, and the padding is verified."""
    chain = proceed(self, context, index).tree.token.tolist()[: self.depth - 2]
    return Draft(DraftTree.build(chain + [0] * (self.depth - len(chain)), range(-1, self.depth - 1)))


def other_map(change):
    """The map from draft tokens to the target's is `change` of what it is."""
    return altered("drafter.runner.d2t", change)


def q_of_another_temperature(factor: float):
    """Drafts are drawn from q; what is recorded and judged by is q at `factor` times the temperature."""

    def changed(q, drawn):
        told = [(row.log() / factor).softmax(-1) for row in q]
        pairs = zip(told, drawn, strict=True)
        return told, [[d._replace(prob=float(row[d.token])) for d in one] for row, one in pairs]

    return taken(changed)


def likeliest_for_drawn(q, drawn):
    """Drafts are the likeliest tokens of q; they are recorded and judged as drawn from it."""
    return q, [[Draw(int(row.argmax()), float(row.max()), 1.0, 0.0, 0.0)] for row in q]


def without_q(draft, places):
    """q is lost on its way: what was sampled is judged as deterministic."""
    tree = DraftTree.build(draft.tree.token.tolist(), draft.tree.parent.tolist())
    return dataclasses.replace(draft, q={}, tree=tree), places


@replaced(tree_builder, "draw_siblings")
def draws_beside(draw_siblings, rows, coins):
    """The search in q's cumulative sum ends one token too early, and q is read at that token."""
    drawn = draw_siblings(rows, coins)
    for row, some in zip(rows.numpy(), drawn, strict=True):
        for child, draw in enumerate(some):
            taken_ones = [one.token for one in some]
            before = [t for t in np.flatnonzero(row[: draw.token]).tolist() if t not in taken_ones]
            if before:
                prob = float(row[before[-1]])
                some[child] = draw._replace(token=before[-1], prob=prob, low=draw.low - prob)
    return drawn


def sorted_siblings(q, drawn):
    """Siblings are drawn, then tried in the order of their q."""
    return q, [sorted(one, key=lambda draw: -draw.prob) for one in drawn]


def pruned_siblings(draft, places):
    """Of what was drawn the unlikely leaves are dropped."""
    tree = draft.tree
    inner = set(tree.parent.tolist())
    kept = [i for i in range(len(tree)) if i in inner or tree.q[i] > 0.15]
    return _only(draft, kept), places[kept]


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
    Fault("lookup one late", Cause.DRAFT_POSITION, shifted_lookup(1), "ngram"),
    Fault("lookup one early", Cause.DRAFT_POSITION, shifted_lookup(-1), "ngram"),
    Fault("model one late", Cause.DRAFT_POSITION, finished(shifted_chain), "model chain"),
    Fault("padding judged", Cause.DRAFT_PLACEHOLDERS, placeholders, "ngram"),
    Fault("map off by a row", Cause.DRAFT_VOCABULARY, other_map(lambda d2t: d2t.roll(1)), "eagle chain"),
    Fault("map left out", Cause.DRAFT_VOCABULARY, other_map(lambda d2t: torch.arange(len(d2t))), "eagle tree warm"),
    Fault("q told warmer", Cause.Q_TEMPERATURE, q_of_another_temperature(1.6), "early chain warm"),
    Fault("q told colder", Cause.Q_TEMPERATURE, q_of_another_temperature(0.6), "early tree warm"),
    Fault("q not drawn from", Cause.Q_NOT_DRAWN, taken(likeliest_for_drawn), "early chain warm", rare=0),
    Fault("q lost", Cause.Q_DROPPED, finished(without_q), "early tree warm"),
    Fault("draws one token early", Cause.Q_NOT_DRAWN, draws_beside, "early chain warm"),
    Fault("siblings by q", Cause.SIBLINGS_CHANGED, taken(sorted_siblings), "early tree warm", rare=60),
    Fault("unlikely siblings dropped", Cause.SIBLINGS_CHANGED, finished(pruned_siblings), "early tree warm"),
]
