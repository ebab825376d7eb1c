"""The bundled head on the bundled model, float32: greedy output is generate()'s, sampled output the target's own."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from specscope import Engine, SamplingParams
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.plans.plan import parse_plan
from specscope.speculate.drafters.base import Context
from specscope.speculate.drafters.tree_builder import Level, StaticTreeBuilder
from specscope.speculate.sampling import distributions
from specscope.speculate.tokens import TokenCounts
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.tree import DraftTree, Drawn
from tests.engine.test_real_model import PROMPTS, TOKENS, reference  # noqa: F401
from tests.speculate.verify.book import Dense
from tests.speculate.verify.oracle import verify

# `least`: accepted tokens.
ENGINES = {
    "static": {"least": 500, "tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"},
    "dynamic": {"least": 500, "tree": "dynamic:16"},
    "as it comes": {"least": 500, "drafter": "auto"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_greedy_output_is_generates_own(reference, name):  # noqa: F811
    prompts, wanted = reference
    assert len(PROMPTS) == 20
    settings = dict(ENGINES[name])
    least = settings.pop("least")
    results = Engine(**{"dtype": "float32", "drafter": "eagle", **settings}).generate(
        prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    )
    assert [r.token_ids for r in results] == wanted
    assert sum(r.acceptance.accepted for r in results) > least


class FixedContext:
    """The real target's p and the real head's q at a context and below it; each path's logits are computed once."""

    def __init__(self, engine, tokens):
        self.engine, self.tokens = engine, tokens
        self._target, self._head, self._p = {}, {}, {}

    def target(self, path):
        """The target's logits after the context and `path`, [V]."""
        if path not in self._target:
            cache, table = self.engine.runner.cache, BlockTable()
            whole = [*self.tokens, *path]
            cache.reserve(table, len(whole), 0)
            segment = Segment.of_tree(table, 0, whole, DraftTree.empty(), logits=True)
            logits, features = self.engine.runner.forward_with_features([segment])
            self._target[path] = logits[0][-1].clone(), features[0][: len(self.tokens) - 1].clone()
            cache.truncate(table, 0)
        return self._target[path][0]

    def p(self, path, prompt):
        """The distribution that is sampled from after the context and `path`."""
        if path not in self._p:
            output = self.tokens[len(prompt) :]
            (p,) = distributions(self.target(path)[None], PARAMS, TokenCounts.of(prompt, output), [path])
            self._p[path] = Dense(p.row)
        return self._p[path]

    def head(self, path):
        """The head's logits at a node: true features up to the context's last token, its own guesses below."""
        if path not in self._head:
            self.target(())
            runner, table = self.engine.drafter.runner, BlockTable()
            runner.cache.reserve(table, len(self.tokens) + len(path), 0)
            pairs = Segment.of_tree(table, 0, list(self.tokens[1:]), DraftTree.empty(), logits=True)
            logits, hidden = runner.forward([pairs], runner.combine(self._target[()][1]))
            for depth, token in enumerate(path):
                at = len(self.tokens) - 1 + depth
                one = Segment.of_tree(table, at, [token], DraftTree.empty(), logits=True)
                logits, hidden = runner.forward([one], hidden[-1:])
            self._head[path] = logits[-1].clone()
            runner.cache.truncate(table, 0)
        return self._head[path]


PARAMS = SamplingParams(temperature=1.6, top_k=6)
PLAN = parse_plan("[(0,), (1,), (0, 0), (1, 0)]")


class Sampler:
    """Speculative steps at contexts that begin alike: draft, judge, commit, with the engine's own parts."""

    def __init__(self, engine, tokens, tested=lambda q: q):
        self.engine, self.prompt, self.tested = engine, tokens, tested
        self.contexts = {}

    def two_tokens(self, seed):
        """The first two tokens of a request with this seed."""
        made = ()
        while len(made) < 2:
            made += self.step(seed, made)
        return made[:2]

    def step(self, seed, made):
        """One step after `made`: the tokens that it commits."""
        fixed = self.contexts.setdefault(made, FixedContext(self.engine, [*self.prompt, *made]))
        params = SamplingParams(temperature=PARAMS.temperature, top_k=PARAMS.top_k, seed=seed)
        context = Context("r", fixed.tokens, len(self.prompt), params)
        builder, runner = StaticTreeBuilder(context, PLAN), self.engine.drafter.runner
        while builder.frontier:
            paths = [tuple(builder.path(node)) for node in builder.frontier]
            level = Level(torch.stack([fixed.head(path) for path in paths]), runner.vocab_size, runner.d2t)
            builder.grow(level, slice(0, len(paths)))
            builder.fed += builder.frontier
        draft, _ = builder.finish()
        tree = draft.tree
        assert set(tree.drawn) == {Drawn.WITHOUT_REPLACEMENT}
        paths = [(), *(tuple(tree.token[tree.path_to(i)].tolist()) for i in range(len(tree)))]
        p = [fixed.p(path, self.prompt) for path in paths]
        q = {node: Dense(self.tested(q)) for node, q in draft.q.items()}
        verdict = verify(tree, p, q, coins(seed, Stream.VERIFY, context.position, len(tree) + 1))
        return (*tree.token[verdict.path].tolist(), verdict.token)

    def exact(self):
        """The target's own joint distribution of the first two tokens."""
        first = FixedContext(self.engine, self.prompt)
        p = first.p((), self.prompt)
        joint = {}
        for a in p.probs.nonzero()[:, 0].tolist():
            then = first.p((a,), self.prompt)
            for b in then.probs.nonzero()[:, 0].tolist():
                joint[a, b] = p.prob(a) * then.prob(b)
        return joint


def p_value(counts, joint, samples):
    """Chi-square of counts against a distribution; cells that expect fewer than 5 are taken together."""
    assert set(counts) <= set(joint), "a token pair of probability zero was sampled"
    large = [cell for cell in joint if samples * joint[cell] >= 5]
    expected = np.array([samples * joint[cell] for cell in large])
    observed = np.array([counts[cell] for cell in large])
    rest = samples - expected.sum()
    if rest > 1e-6:
        expected, observed = np.append(expected, rest), np.append(observed, samples - observed.sum())
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


@pytest.mark.slow
def test_sampled_output_has_the_targets_distribution_and_a_fault_is_seen():
    engine = Engine(dtype="float32", drafter="eagle", tree="4")
    tokens = engine.encode(engine.turn("Name a colour, an animal and a city."))[1]
    samples = 20_000
    right = Sampler(engine, tokens)
    joint = right.exact()
    assert sum(joint.values()) == pytest.approx(1, abs=1e-5)
    assert len(joint) > 20
    counts = Counter(right.two_tokens(seed) for seed in range(samples))
    assert p_value(counts, joint, samples) > 1e-3
    # The fault: the ratio test has q as it was before temperature, not the q that was drawn from.
    wrong = Sampler(engine, tokens, lambda q: q**PARAMS.temperature / (q**PARAMS.temperature).sum())
    counts = Counter(wrong.two_tokens(seed) for seed in range(samples // 2))
    assert p_value(counts, joint, samples // 2) < 1e-6
