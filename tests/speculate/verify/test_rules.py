"""Every rule of verification: lossless by exact enumeration, with planted mistakes caught."""

import inspect
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.model.places import Backend
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import TargetRows
from specscope.speculate.verify import batch as inputs
from specscope.speculate.verify import distribution, host, match, traversal
from specscope.speculate.verify.distribution import Residual
from specscope.speculate.verify.verifier import Verifier, on_device
from specscope.testing import enumeration
from specscope.testing.enumeration import by_coins, chance_drawn, conditional, total_variation
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, TRAVERSAL
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.tree_shape import parse_tree
from tests.kernels import DEVICE
from tests.speculate.verify.enumeration import SHAPES, batch_of, random_input

DRAWN = pytest.mark.parametrize("drawn", list(Drawn), ids=lambda d: d.name.lower())
DEEP = [*SHAPES, ("3", 3), ("[(0,), (1,), (0, 0), (0, 1), (1, 0)]", 3), ("[(0,), (0, 0), (0, 0, 0), (0, 1)]", 3)]


def post_order(tree):
    """Nodes in the order in which traversal tests their coins."""

    def below(node):
        for child in tree.children(node):
            yield from below(child)
            yield child

    return list(below(ROOT))


# Looked up when they are called: tests plant others
standard = by_coins(lambda batch: host.verify(batch))
ahead = by_coins(lambda batch: traversal.verify(batch), post_order)


def matched(tree, p, q):
    """Every draw at every node under token matching, as the coin that makes it."""

    def explore(coins, weight):
        coin = np.full(len(tree) + 1, 0.5)
        for parent, value in coins.items():
            coin[1 + tree.children(parent)[0]] = value
        (verdict,), (left,) = match.verify(batch_of(tree, p, q, coin))
        reached = [ROOT, *verdict.path.tolist()]
        fresh = next((node for node in reached if tree.children(node) and node not in coins), None)
        if fresh is not None:
            row = p[fresh + 1].numpy()
            ends = np.cumsum(row) / row.sum()
            for end, share in zip(ends, row, strict=True):
                yield from explore(coins | {fresh: end - share / 2}, weight * share)
            return
        last = left.row.numpy()
        if verdict.kind is FinalKind.RECOVERED:
            last = np.eye(len(last))[verdict.token]
        yield weight, verdict.path, last

    yield from explore({}, 1.0)


def worst(text, vocab, drawn, outcomes, seeds=2, **how):
    models = ((conditional(vocab, seed), conditional(vocab, seed + 1000)) for seed in range(seeds))
    return max(total_variation(parse_tree(text), *each, drawn, outcomes, **how) for each in models)


@pytest.mark.every(2)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), SHAPES)
def test_the_standard_rule_emits_the_targets_distribution(text, vocab, drawn):
    """Total variation from the target, over every draw and coin outcome, for many random p and q."""
    assert worst(text, vocab, drawn, standard) < 1e-12


@pytest.mark.every(3)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), DEEP)
def test_traversal_emits_the_targets_distribution(text, vocab, drawn):
    assert worst(text, vocab, drawn, ahead) < 1e-12


@pytest.mark.every(3)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), SHAPES)
def test_matching_emits_the_targets_distribution(text, vocab, drawn):
    assert worst(text, vocab, drawn, matched) < 1e-12


# Mistakes


def mutant(module, old, new):
    """The module's `verify` with a piece of its text replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, old
    changed = types.ModuleType(module.__name__ + "_mutant")
    sys.modules[changed.__name__] = changed  # dataclasses look their module up
    exec(compile(source.replace(old, new), changed.__name__, "exec"), changed.__dict__)
    return changed.verify


def sorted_siblings(tree, q):
    order = np.argsort([-float(q[ROOT][int(t)]) for t in tree.token], kind="stable")
    return DraftTree.build(tree.token[order], tree.parent, drawn=Drawn.WITHOUT_REPLACEMENT)


def pruned(tree, q):
    kept = int(np.argmax([float(q[ROOT][int(t)]) for t in tree.token]))
    return DraftTree.build([tree.token[kept]], [ROOT], drawn=Drawn.WITHOUT_REPLACEMENT)


def top_k(q, tokens, drawn):
    return chance_drawn(q, tokens, Drawn.DETERMINISTIC)


def not_divided(self, token, q, scale=1.0):
    left = (self.row - q).clamp(min=0)
    return (Residual(left) if left.any() else self), float(left.sum())


def zeroed(q, token):
    return q.scatter(0, torch.tensor([token]), 0)


MISTAKES = {  # what is wrong, in drafting or in the rule
    "a ratio test of deterministic drafts": (enumeration, "chance_drawn", top_k),
    "the residual is not renormalised": (Residual, "reject", not_divided),
    "q is not renormalised": (distribution, "without", zeroed),
    "q keeps a rejected sibling": (distribution, "without", lambda q, token: q),
    "the residual is forgotten": (Residual, "reject", lambda self, token, q, scale=1.0: (self, 1.0)),
    "siblings are sorted by q": sorted_siblings,
    "a sampled sibling is pruned": pruned,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_drafting_and_of_the_standard_rule_are_caught(monkeypatch, name):
    mistake, how = MISTAKES[name], {}
    if callable(mistake):
        how["rearrange"] = mistake
    else:
        monkeypatch.setattr(*mistake)
    assert max(worst(shape, 5, Drawn.WITHOUT_REPLACEMENT, standard, **how) for shape in ("2x1", "3x1")) > 0.05


TRAVERSAL_MISTAKES = {
    "the ratio is not capped at 1": ("min(1.0, ratio * p_token / q_token)", "ratio * p_token / q_token"),
    "the ratio starts anew at each node": ("min(1.0, ratio * p_token", "min(1.0, p_token"),
    "the residual is not scaled by the ratio": ("gone=gone, scale=ratio", "gone=gone"),
    "the parent keeps its ratio when a child is rejected": ("ratio = mass / (mass + (1 - ratio))", "ratio = ratio"),
    "the parent's ratio is the residual's mass": ("mass / (mass + (1 - ratio))", "mass"),
    "q keeps a rejected sibling": ("gone=gone, scale=ratio", "gone=False, scale=ratio"),
    "the final token is drawn from all of p": ("return (row, left) if", "return (row, self.at_row[row]) if"),
    "so it is at the root": ("return row, left\n", "return row, self.at_row[row]\n"),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", TRAVERSAL_MISTAKES)
def test_mistakes_of_traversal_are_caught(monkeypatch, name):
    monkeypatch.setattr(traversal, "verify", mutant(traversal, *TRAVERSAL_MISTAKES[name]))
    shapes = [("2", 4), ("3x1", 5), ("[(0,), (1,), (0, 0), (1, 0)]", 3)]
    assert max(worst(text, vocab, Drawn.WITHOUT_REPLACEMENT, ahead) for text, vocab in shapes) > 0.005


MATCH_MISTAKES = {
    "each child has a coin of its own": ("accepted = token == child_token", "accepted = coin < left.prob(child_token)"),
    "a recovered token is drawn from all of p": ("return None, left, token", "return None, p, child_token"),
    "the draw forgets what a child took": ("= p.draw(coin)", "= left_over(p, trees, children).draw(coin)"),
}


def left_over(p, trees, children):
    """p without the first child: a draw that can never accept it."""
    return p.reject(int(trees.token[children[0]]), None)[0]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MATCH_MISTAKES)
def test_mistakes_of_matching_are_caught(monkeypatch, name):
    planted = mutant(match, *MATCH_MISTAKES[name])
    planted.__globals__["left_over"] = left_over
    monkeypatch.setattr(match, "verify", planted)
    assert max(worst(text, vocab, Drawn.WITHOUT_REPLACEMENT, matched) for text, vocab in SHAPES[:3]) > 0.05


# The verdict and its evidence


@pytest.mark.parametrize(
    ("verify", "where"), [(lambda batch: host.verify(batch)[0], "cpu"), (on_device, DEVICE)], ids=["host", "device"]
)
def test_a_forced_rejection_leaves_of_its_token_what_the_rule_leaves(verify, where):
    """p exceeds q at the token: nobody but a fork rejects there, and the rest of its mass may still be drawn."""
    tree = DraftTree.build([0, 1], [ROOT, ROOT], [0.2, 0.3], Drawn.WITHOUT_REPLACEMENT)
    p, q = (torch.tensor([*some, 0.0]) for some in ([0.6, 0.1, 0.3], [0.2, 0.3, 0.5]))
    (got,) = verify(batch_of(tree, [p] * 3, {ROOT: q}, [0.5, 0.01, 0.9], {0: False}, where=where))
    assert got.outcome.tolist() == [Outcome.REJECTED, Outcome.REJECTED]
    assert got.residual_mass[0] == pytest.approx(0.4)
    assert (got.token, got.kind, got.forced.tolist()) == (0, FinalKind.RECOVERED, [0])


# All rules alike


@pytest.mark.parametrize(("rule", "name"), [(host, STANDARD), (traversal, TRAVERSAL), (match, MATCH)])
@given(seed=st.integers(0, 2**32 - 1), drawn=st.sampled_from(list(Drawn)), greedy=st.booleans())
@settings(max_examples=60, deadline=None)
def test_forced_outcomes_are_kept(rule, name, seed, drawn, greedy):
    """A node that is forced rejected is on no path; one that is forced accepted is, where its turn came."""
    *asked, forced, final = random_input(np.random.default_rng(seed), drawn, greedy, 0.5)
    (found,), _ = rule.verify(batch_of(*asked, forced, final))
    for node, accepted in forced.items():
        if found.outcome[node] != Outcome.UNTRIED:
            assert (node in found.path) is accepted
            assert node in found.forced
    assert final is None or found.token == final
    assert found.rule == name


def judged(backend, context, draft, logits, rule=STANDARD):
    """The verdict on a draft, and what is noted beside it."""
    step = Verifier(backend, rule=rule).judge([(context, draft, logits)])
    return step.verdicts[0], step.notes()[0]


@pytest.mark.parametrize("rule", [BLOCK, TRAVERSAL, MATCH])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_verifier_on_the_device_judges_these_rules_on_the_host(rule, temperature):
    """The target's rows come from the backend's kernels; verdicts and notes are those of the host's own backend."""
    logits = 2 * torch.randn(4, 11, generator=torch.Generator().manual_seed(5))
    tree = DraftTree.build([int(logits[0].argmax()), 4, 3], [ROOT, 0, 1])
    context = Context("r", [5, 6, 7], 2, SamplingParams(temperature=temperature, seed=3))
    found = []
    for backend in Backend:
        where = DEVICE if backend is Backend.TRITON else "cpu"
        verdict, notes = judged(backend, context, Draft(tree), logits.to(where), rule)
        assert verdict.rule == rule
        found.append((verdict.path.tolist(), verdict.token, notes.final_entropy))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] == pytest.approx(found[1][2], abs=1e-4)


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a GPU, and cannot be read but by a copy."""

    device = property(lambda tensor: torch.device("cuda"))

    def cpu(self):
        return torch.Tensor.cpu(self).as_subclass(torch.Tensor)

    def numpy(self):
        raise TypeError("can't convert cuda tensor to numpy: use Tensor.cpu() first")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_torch_backend_judges_rows_of_a_device(monkeypatch, temperature):
    """`--backend torch` on a GPU: what `doctor` recommends where Triton does not run."""
    logits = 2 * torch.randn(3, 11, generator=torch.Generator().manual_seed(5))
    q = logits[0].softmax(-1)
    tree = DraftTree.build(
        [int(logits[0].argmax()), 4], [ROOT, ROOT], [float(q.max()), float(q[4])], Drawn.WITH_REPLACEMENT
    )
    context = Context("r", [5, 6, 7], 2, SamplingParams(temperature=temperature, seed=3))
    wanted, of_host = judged(Backend.TORCH, context, Draft(tree, {ROOT: q}), logits)
    rows = inputs.target_rows([context.rows(logits, list)])
    on_device = TargetRows(rows.choices.as_subclass(OnDevice), rows.p.as_subclass(OnDevice))
    monkeypatch.setattr(inputs, "target_rows", lambda parts: on_device)
    draft = Draft(tree, {ROOT: q.as_subclass(OnDevice)})
    verdict, notes = judged(Backend.TORCH, context, draft, logits)
    assert verdict == wanted
    assert notes == of_host
