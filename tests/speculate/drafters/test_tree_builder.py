"""Trees as they grow, against a brute-force EAGLE-2 and plain drawing: random logits that follow from the path."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.model.kv_cache import BlockTable
from specscope.plans.plan import DynamicPlan, StaticPlan, parse_plan
from specscope.speculate.drafters.base import Context, Level
from specscope.speculate.drafters.tree_builder import grow_trees, start_tree
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import ROOT, Drawn
from specscope.tree_shape import parse_tree
from tests.trace.record.test_tree import shapes

VOCAB = 30
D2T = torch.tensor([2, 3, 5, 8, 13, 21, 22, 29])  # what a reduced vocabulary of 8 tokens stands for


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The drafter's logits as a function of the path of drafted tokens."""

    seed: int
    d2t: torch.Tensor | None = None

    def __call__(self, path):
        known = VOCAB if self.d2t is None else len(self.d2t)
        seed = np.random.default_rng([self.seed, *path]).integers(2**31)
        return torch.randn(known, generator=torch.Generator().manual_seed(int(seed))) * 2

    def full(self, path):
        """Over the target's vocabulary, in plain torch."""
        out = torch.full((VOCAB,), -torch.inf)
        out[torch.arange(VOCAB) if self.d2t is None else self.d2t] = self(path)
        return out


def context(name="r", tokens=(7, 9, 4), **params):
    return Context(name, list(tokens), 2, SamplingParams(**params))


def grow(oracles, contexts, plan, base=40):
    """Grow several requests' trees in common passes; their drafts, places and growths."""
    growths = [start_tree(c, plan) for c in contexts]
    alive, first = list(range(len(growths))), True
    while alive:
        rows, at, slices = [], 0, {}
        for i in alive:
            builder = growths[i]
            if not first:
                builder.segment(BlockTable([0]), base)
            rows += [oracles[i](builder.path(node)) for node in builder.frontier]
            slices[i] = range(at, at := at + len(builder.frontier))
        level = Level(torch.stack(rows), VOCAB, oracles[0].d2t)
        for i in alive:
            grow_trees(level, [(growths[i], slices[i])])
        alive, first = [i for i in alive if growths[i].frontier], False
    return [(*builder.finish(), builder) for builder in growths]


def eagle2(oracle, plan):
    """EAGLE-2 by the book, on paths: {path: (log prob of its token, score)} kept, dropped, and run by the drafter."""
    found, beam, run = {}, [()], []
    for depth in range(plan.depth):
        run += beam if depth else []
        new = {}
        for path in beam:
            row = oracle.full(path).log_softmax(-1)
            for token in row.argsort(descending=True)[: plan.top].tolist():
                above = found[path][1] if path else 0.0
                if row[token] > -torch.inf:
                    new[(*path, token)] = float(row[token]), above + float(row[token])
        found |= new
        beam = sorted(new, key=lambda path: -new[path][1])[: plan.top]
    best = sorted(found, key=lambda path: -found[path][1])[: plan.nodes]
    kept = {path: found[path] for path in best}
    return kept, {path: value for path, value in found.items() if path not in kept}, set(run)


def paths_of(tree):
    return [tuple(tree.token[tree.path_to(node)].tolist()) for node in range(len(tree))]


plans = st.builds(DynamicPlan, st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))


@given(plans, st.integers(0, 2**20), st.booleans())
@settings(max_examples=60)
def test_a_dynamic_tree_is_eagle_2_by_the_book(plan, seed, reduced):
    oracles = [Oracle(seed + i, D2T if reduced else None) for i in range(2)]
    for oracle, (draft, places, builder) in zip(
        oracles, grow(oracles, [context("a"), context("b")], plan), strict=True
    ):
        kept, dropped, run = eagle2(oracle, plan)
        paths, notes = paths_of(draft.tree), draft.notes
        assert set(paths) == set(kept)
        assert len(set(paths)) == len(paths) <= plan.max_nodes
        assert all(path[:-1] in kept for path in paths if len(path) > 1), "closed under parents"
        assert (draft.tree.drawn == Drawn.DETERMINISTIC).all()
        assert (draft.tree.q == 1).all()
        assert draft.q == {}
        assert notes.prob == pytest.approx(np.exp([kept[path][0] for path in paths]), rel=1e-5)
        assert notes.score == pytest.approx([kept[path][1] for path in paths], rel=1e-5, abs=1e-6)
        assert all(above < node for node, above in enumerate(draft.tree.parent))

        # What was left out: numbered on after the kept nodes.
        everything = list(paths)
        for token, parent in zip(notes.dropped_token.tolist(), notes.dropped_parent.tolist(), strict=True):
            assert -1 <= parent < len(everything)
            everything.append((*(everything[parent] if parent != ROOT else ()), token))
        left = everything[len(paths) :]
        assert set(left) == set(dropped)
        assert len(left) == len(dropped)
        assert notes.dropped_score == pytest.approx([dropped[path][1] for path in left], rel=1e-5, abs=1e-6)

        # Where each node's KV lies: those that were run, in their order.
        fed = [tuple(builder.path(node)) for node in builder.fed]
        assert set(fed) == run
        assert len(fed) == len(run) <= sum(plan.fed)
        assert places.tolist() == [fed.index(path) if path in run else -1 for path in paths]


@given(shapes(), st.integers(0, 2**20), st.booleans(), st.sampled_from(["top", "greedy"]))
@settings(max_examples=40)
def test_a_static_tree_of_top_tokens(paths, seed, reduced, why):
    shape, oracle = parse_tree(str(paths)), Oracle(seed, D2T if reduced else None)
    params = {"temperature": 0.8} if why == "top" else {}
    ((draft, places, _),) = grow([oracle], [context(**params)], StaticPlan(shape, top=why == "top"))
    tree = draft.tree
    if max(len(shape.children(node)) for node in range(ROOT, len(shape))) <= (len(D2T) if reduced else VOCAB):
        assert tree.parent.tolist() == list(shape.parent)
    assert (tree.drawn == Drawn.DETERMINISTIC).all()
    assert draft.q == {}
    for node in range(ROOT, len(tree)):
        path = tree.token[tree.path_to(node)].tolist() if node != ROOT else []
        children = tree.children(node)
        row = oracle.full(path).log_softmax(-1)
        best = row.argsort(descending=True)[: len(children)]
        assert tree.token[children].tolist() == best.tolist()
        assert draft.notes.prob[children] == pytest.approx(row[best].exp().numpy(), rel=1e-5)
    scores = [np.log(draft.notes.prob[tree.path_to(node)]).sum() for node in range(len(tree))]
    assert draft.notes.score == pytest.approx(scores, rel=1e-4, abs=1e-5)
    inner = [node for node in range(len(tree)) if tree.children(node)]
    assert [node for node in range(len(tree)) if places[node] >= 0] == inner
    assert sorted(places[inner].tolist()) == list(range(len(inner)))


def plain_draws(oracle, shape, q_of, coin):
    """Tokens of a sampled tree, drawn without replacement in plain numpy; how far each coin is from another token."""
    tokens, margins, paths = [], [], {ROOT: []}
    for node, above in enumerate(shape.parent):
        left = q_of(oracle.full(paths[above])).double().numpy()
        for sibling in shape.children(above):
            if sibling < node:
                left = left * (np.arange(VOCAB) != tokens[sibling])
        cumulative = np.cumsum(left / left.sum())
        tokens.append(int(np.searchsorted(cumulative, coin[node], side="right")))
        paths[node] = [*paths[above], tokens[-1]]
        borders = cumulative[(cumulative > 1e-12) & (cumulative < 1 - 1e-12)]
        margins.append(np.abs(borders - coin[node]).min(initial=1.0))
    return tokens, margins


@given(
    st.sampled_from(["1", "4", "3x3", "[(0,), (1,), (0, 0), (0, 1), (1, 0)]", "8x1"]),
    st.integers(0, 2**20),
    st.booleans(),
    st.floats(0.3, 1.5),
    st.integers(0, 5),
)
@settings(max_examples=60)
def test_a_sampled_tree_is_drawn_without_replacement_from_its_coins(text, seed, reduced, temperature, longer):
    plan, oracle = parse_plan(text), Oracle(seed, D2T if reduced else None)
    asked = context(tokens=[7, 9, *[4] * (1 + longer)], temperature=temperature, seed=seed)
    ((draft, _, _),) = grow([oracle], [asked], plan)
    tree = draft.tree
    assert tree.parent.tolist() == list(plan.shape.parent)
    assert (tree.drawn == Drawn.WITHOUT_REPLACEMENT).all()
    assert set(draft.q) == set(tree.parent.tolist())
    for node, q in draft.q.items():
        path = tree.token[tree.path_to(node)].tolist() if node != ROOT else []
        wanted = (oracle.full(path) / temperature).softmax(-1)
        torch.testing.assert_close(q, wanted)
        known = torch.arange(VOCAB) if oracle.d2t is None else oracle.d2t
        assert q[np.setdiff1d(np.arange(VOCAB), known)].tolist() == [0.0] * (VOCAB - len(known))
        children = tree.token[tree.children(node)].tolist()
        assert len(set(children)) == len(children), "siblings differ"
        assert set(children) <= set(known.tolist())
        # q stands as the tensor that was sampled from, before anything was taken out of it.
        assert tree.q[tree.children(node)].tolist() == [float(q[token]) for token in children]
    assert draft.notes.prob == pytest.approx(tree.q, rel=1e-5)
    coin = coins(seed, Stream.DRAFT, len(asked.tokens) - 1, len(plan.shape))
    tokens, margins = plain_draws(oracle, plan.shape, lambda x: (x / temperature).softmax(-1), coin)
    assert tree.token.tolist() == tokens
    assert draft.notes.draw_margin == pytest.approx(margins, abs=1e-6)
    assert draft.notes.coin.tolist() == coin.tolist()  # number for number: nothing ran dry
