"""Faults put into a running engine: the audit finds each, and its condition names the place."""

import dataclasses

import numpy as np
import pytest
import torch

from specscope.model.batch import Segment
from specscope.speculate.drafters import parallel
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.ngram import NgramDrafter
from specscope.speculate.drafters.tree_builder import TreeBuilder
from specscope.speculate.verify import inputs
from specscope.trace.record.tree import DraftTree
from tests.analyze.audit.runs import RULES, Bench, failed, run
from tests.engines import PROMPTS


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("head"))


def mask_siblings(engine, patch):
    """A node sees its elder siblings too."""
    real = Segment.of_tree

    def of_tree(table, context, tokens, tree, *, logits):
        segment = real(table, context, tokens, tree, logits=logits)
        c = len(tokens)
        for node, above in enumerate(tree.parent.tolist()):
            for elder in tree.children(above):
                if elder < node:
                    segment.mask[c + node, c + elder] = True
        return segment

    patch.setattr(Segment, "of_tree", staticmethod(of_tree))


def positions_by_index(engine, patch):
    """A node's rotary position is its place among the nodes, not its depth."""
    real = Segment.of_tree

    def of_tree(table, context, tokens, tree, *, logits):
        segment = real(table, context, tokens, tree, logits=logits)
        c = len(tokens)
        positions = np.concatenate([segment.positions[:c], context + c + np.arange(len(tree))])
        return dataclasses.replace(segment, positions=positions)

    patch.setattr(Segment, "of_tree", staticmethod(of_tree))


def kv_not_moved(engine, patch):
    """The accepted path's KV stays where the tree lay."""
    patch.setattr(engine.runner.cache, "move", lambda moves: None)


def penalties_off_path(engine, patch):
    """Penalties count the tokens before the root alone."""
    real = inputs._rows

    def rows(context, draft, logits):
        found = real(context, draft, logits)
        return dataclasses.replace(found, paths=[[] for _ in found.paths])

    patch.setattr(inputs, "_rows", rows)


def top_p_left_out(engine, patch):
    """Odd batches sample without top-p: p of the drafted tokens is another."""
    real = inputs._rows

    def rows(context, draft, logits):
        found = real(context, draft, logits)
        return dataclasses.replace(found, params=dataclasses.replace(found.params, top_p=1.0))

    patch.setattr(inputs, "_rows", rows)


def other_layers(engine, patch):
    """The features of the layers come in another order."""
    real = Eagle.observe

    def observe(self, request, start, features, tokens):
        real(self, request, start, features.roll(features.shape[-1] // 3, -1), tokens)

    patch.setattr(Eagle, "observe", observe)


def stale_features(engine, patch):
    """The accepted path's features are those of the root."""
    phases = engine.phases
    real = phases.show_features

    def show(turn):
        turn.features = turn.features.clone()
        turn.features[turn.feed :] = turn.features[turn.feed - 1]
        real(turn)

    patch.setattr(phases, "show_features", show)


def short_rotary_table(engine, patch):
    """The head's rotary table ends at 30."""
    runner = engine.drafter.runner
    turns = runner._turns.clone()
    turns[30:] = turns[29]
    patch.setattr(runner, "_turns", turns)


def tree_positions(engine, patch):
    """In the drafter's tree every position is one too high."""
    real = TreeBuilder.segment

    def segment(self, table, base):
        found = real(self, table, base)
        return dataclasses.replace(found, positions=found.positions + 1)

    patch.setattr(TreeBuilder, "segment", segment)


def missing_leaf(engine, patch):
    """After a full acceptance the drafter takes its last token for computed."""
    real = DraftModel.commit

    def commit(self, context, tree, verdict):
        real(self, context, tree, verdict)
        state = self.states[context.request]
        if len(verdict.path) and not tree.children(int(verdict.path[-1])):
            state.computed = len(context.tokens) + len(verdict.path)
            self.cache.reserve(state.table, state.computed + 1, state.computed)

    patch.setattr(DraftModel, "commit", commit)


def shifted_lookup(engine, patch):
    """Prompt lookup begins one token late."""
    real = NgramDrafter._continue

    def go_on(self, context, index):
        draft = real(self, context, index)
        if len(draft.tree) < 2:
            return draft
        token = np.roll(draft.tree.token, -1)
        return dataclasses.replace(draft, tree=dataclasses.replace(draft.tree, token=token))

    patch.setattr(NgramDrafter, "_continue", go_on)


def wrong_vocabulary(engine, patch):
    """In the map of the reduced vocabulary each token has its neighbour's place."""
    runner = engine.drafter.runner
    patch.setattr(runner, "d2t", runner.d2t.roll(1))


def q_of_another_temperature(engine, patch):
    """q is recorded as it was before the temperature."""
    real = DraftTree.build

    def build(token, parent, q=None, drawn=0):
        return real(token, parent, None if q is None else [x**0.7 for x in q], drawn)

    patch.setattr(DraftTree, "build", staticmethod(build))


def masks_at_one_position(engine, patch):
    """Every mask row of a P-EAGLE head lies right behind the root's pair."""
    real = parallel.with_masks

    def with_masks(segment, count, mask_token):
        found = real(segment, count, mask_token)
        found.positions[len(segment.tokens) :] = found.positions[len(segment.tokens) - 1] + 1
        return found

    patch.setattr(parallel, "with_masks", with_masks)


MANY = [f"{word} {number}" for number in range(5) for word in ("one two one two", "abc", "so it goes", "x y", "zzz")]
# The fault, the engine and the rule that it shows in, the check that fails, and words of the condition: any will do.
FAULTS = [
    (mask_siblings, "same model", "temperature", "target p", ["first sibling", "sibling"]),
    (positions_by_index, "same model, top", "cold", "target p", ["ancestors", "the parent", "first sibling"]),
    (kv_not_moved, "same model, top", "cold", "target p", ["path of the step before was moved"]),
    (penalties_off_path, "same model", "penalties", "target p", ["depth", "the parent is"]),
    (top_p_left_out, "same model", "top-p", "target p", ["all "]),
    (other_layers, "eagle", "greedy", "draft p", ["all "]),
    (
        stale_features,
        "eagle dynamic",
        "greedy",
        "draft p",
        ["accepted in the step before", "the step before is", "nodes of the step before"],
    ),
    (short_rotary_table, "eagle", "greedy", "draft p", ["position", "context length", "output tokens"]),
    (tree_positions, "eagle dynamic", "greedy", "draft p", ["depth", "the parent is"]),
    (masks_at_one_position, "p-eagle dynamic", "greedy", "draft p", ["depth", "the parent is"]),
    (missing_leaf, "same model, top", "cold", "draft p", ["the step before is full", "accepted in the step before"]),
    (shifted_lookup, "ngram", "greedy", "drafter tree", ["nodes", "depth of the tree", "drafter is"]),
    (wrong_vocabulary, "eagle", "greedy", "drafter tokens", ["all "]),
    (q_of_another_temperature, "draft tree", "temperature", "draft p", ["all "]),
]


# These stay in a cache: one step in each request shows what began it, so it takes several requests.
BEGIN_LATE = (positions_by_index, kv_not_moved, missing_leaf, stale_features)


@pytest.mark.every(3)
@pytest.mark.parametrize(("plant", "name", "rule", "check", "words"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_fault_is_found_where_it_is(bench, monkeypatch, plant, name, rule, check, words):
    engine = bench.fresh(name)
    with monkeypatch.context() as patch:
        plant(engine, patch)
        with torch.inference_mode():
            history = run(engine, RULES[rule], prompts=MANY if plant in BEGIN_LATE else PROMPTS)
    found = bench.audit(engine, history)
    assert check in failed(found), [(f.name, f.tested, f.failed) for f in found.findings]
    said = found.finding(check).sentence
    print(plant.__name__, "|", said)
    assert any(word in said for word in words), said
