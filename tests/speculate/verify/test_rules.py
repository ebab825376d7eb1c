"""Block verification, traversal and token matching: lossless by exact enumeration, with planted mistakes caught."""

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
from specscope.speculate.sampling import Memory, TargetRows
from specscope.speculate.verify import host, inputs, match, traversal
from specscope.speculate.verify.distribution import Residual
from specscope.speculate.verify.inputs import VerifyBatch, VerifyInput
from specscope.speculate.verify.verifier import Verifier
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.rules import BLOCK, MATCH, TRAVERSAL
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.tree_shape import parse_tree
from tests.kernels import DEVICE
from tests.speculate.verify.enumeration import SHAPES, Model, dense, draws, total_variation
from tests.speculate.verify.test_oracle import coin_outcomes
from tests.speculate.verify.test_verify import random_input

ACCEPT, REJECT = 1e-300, 1 - 2.0**-53
DRAWN = pytest.mark.parametrize("drawn", list(Drawn), ids=lambda d: d.name.lower())
DEEP = [*SHAPES, ("3", 3), ("[(0,), (1,), (0, 0), (0, 1), (1, 0)]", 3), ("[(0,), (0, 0), (0, 0, 0), (0, 1)]", 3)]


def batch_of(tree, p, q, coin, forced=None, greedy=False):
    rows = torch.stack([row.probs for row in p]) if not greedy else torch.zeros(0, 3)
    choices = torch.tensor(p if greedy else [], dtype=torch.int64)
    q = {node: getattr(row, "probs", row) for node, row in q.items()}  # by the book, or as the engine has them
    one = VerifyInput(tree, q, np.asarray(coin, float), greedy, forced or {})
    return VerifyBatch.build([one], TargetRows(choices, rows))


def post_order(tree):
    """Nodes in the order in which traversal tests their coins."""

    def below(node):
        for child in tree.children(node):
            yield from below(child)
            yield child

    return list(below(ROOT))


def ahead(tree, p, q):
    """Every outcome of the coins under traversal: (probability, path, what the final token is drawn from)."""
    order = post_order(tree)

    def explore(given_nodes, weight):
        coin = [0.5, *(ACCEPT if given_nodes.get(node) else REJECT for node in range(len(tree)))]
        (verdict,), (left,) = traversal.verify(batch_of(tree, p, q, coin))
        open_ones = [node for node in order if verdict.judged[node] and node not in given_nodes]
        fresh = next((node for node in open_ones if verdict.accept_prob[node] > 0), None)
        if fresh is None:
            yield weight, verdict.path, left.row.numpy()
            return
        accept = min(verdict.accept_prob[fresh], 1.0)
        yield from explore(given_nodes | {fresh: True}, weight * accept)
        if accept < 1:
            yield from explore(given_nodes | {fresh: False}, weight * (1 - accept))

    yield from explore({}, 1.0)


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
            row = p[fresh + 1].probs.numpy()
            ends = np.cumsum(row) / row.sum()
            for end, share in zip(ends, row, strict=True):
                yield from explore(coins | {fresh: end - share / 2}, weight * share)
            return
        last = left.row.numpy()
        if verdict.kind is FinalKind.RECOVERED:
            last = np.eye(len(last))[verdict.token]
        yield weight, verdict.path, last

    yield from explore({}, 1.0)


def worst(text, vocab, drawn, outcomes, seeds=5):
    return max(total_variation(parse_tree(text), seed, vocab, drawn, outcomes) for seed in range(seeds))


@pytest.mark.every(3)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), DEEP)
def test_traversal_emits_the_targets_distribution(text, vocab, drawn):
    assert worst(text, vocab, drawn, ahead, 3) < 1e-12


@pytest.mark.every(3)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), SHAPES)
def test_matching_emits_the_targets_distribution(text, vocab, drawn):
    assert worst(text, vocab, drawn, matched, 2) < 1e-12


# Mistakes


def mutant(module, old, new):
    """The module's `verify` with a piece of its text replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, old
    changed = types.ModuleType(module.__name__ + "_mutant")
    sys.modules[changed.__name__] = changed  # dataclasses look their module up
    exec(compile(source.replace(old, new), changed.__name__, "exec"), changed.__dict__)
    return changed.verify


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


@pytest.mark.parametrize("name", TRAVERSAL_MISTAKES)
def test_mistakes_of_traversal_are_caught(monkeypatch, name):
    monkeypatch.setattr(traversal, "verify", mutant(traversal, *TRAVERSAL_MISTAKES[name]))
    shapes = [("2", 4), ("3x1", 5), ("[(0,), (1,), (0, 0), (1, 0)]", 3)]
    assert max(worst(text, vocab, Drawn.WITHOUT_REPLACEMENT, ahead, 2) for text, vocab in shapes) > 0.005


MATCH_MISTAKES = {
    "each child has a coin of its own": ("accepted = token == child_token", "accepted = coin < left.prob(child_token)"),
    "a recovered token is drawn from all of p": ("return None, left, token", "return None, p, child_token"),
    "the draw forgets what a child took": ("= p.draw(coin)", "= left_over(p, trees, children).draw(coin)"),
}


def left_over(p, trees, children):
    """p without the first child: a draw that can never accept it."""
    return p.reject(int(trees.token[children[0]]), None)[0]


@pytest.mark.parametrize("name", MATCH_MISTAKES)
def test_mistakes_of_matching_are_caught(monkeypatch, name):
    planted = mutant(match, *MATCH_MISTAKES[name])
    planted.__globals__["left_over"] = left_over
    monkeypatch.setattr(match, "verify", planted)
    assert max(worst(text, vocab, Drawn.WITHOUT_REPLACEMENT, matched, 2) for text, vocab in SHAPES[:3]) > 0.05


# What it gains


def mean_accepted(shape, seed, vocab, drawn, outcomes):
    """Expected number of accepted tokens, in closed form."""
    p_model, q_model, total = Model(vocab, seed), Model(vocab, seed + 1000), 0.0
    for tokens, weight in draws(shape, q_model, drawn):
        tree = DraftTree.build([tokens[i] for i in range(len(shape))], shape.parent, drawn=drawn)
        paths = [(), *(tuple(tree.token[tree.path_to(i)].tolist()) for i in range(len(tree)))]
        q = {n: dense(q_model(paths[n + 1])) for n in [ROOT, *range(len(tree))] if shape.children(n)}
        p = [dense(p_model(path)) for path in paths]
        for share, path, _ in outcomes(tree, p, {} if drawn == Drawn.DETERMINISTIC else q):
            total += weight * share * len(path)
    return total


@pytest.mark.every(3)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), DEEP)
def test_traversal_accepts_at_least_as_much_as_the_standard_rule(text, vocab, drawn):
    shape, gain = parse_tree(text), []
    for seed in range(3):
        standard, ours = (mean_accepted(shape, seed, vocab, drawn, rule) for rule in (coin_outcomes, ahead))
        assert ours >= standard - 1e-12
        gain.append(ours - standard)
    if drawn == Drawn.DETERMINISTIC:  # nothing accepts more: a child is accepted as often as it is the target's token
        assert max(gain) < 1e-12
    elif shape.max_depth > 1:
        assert max(gain) > 1e-3


@pytest.mark.parametrize(("text", "vocab"), SHAPES)
def test_matching_accepts_what_the_standard_rule_does_of_deterministic_drafts(text, vocab):
    shape = parse_tree(text)
    for seed in range(2):
        standard, ours = (
            mean_accepted(shape, seed, vocab, Drawn.DETERMINISTIC, rule) for rule in (coin_outcomes, matched)
        )
        assert ours == pytest.approx(standard, abs=1e-12)


# Block verification as its paper writes it


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_a_chain_is_judged_as_block_verification_has_it(seed, length, sampled):
    """Sun et al. 2024, Algorithm 2: every h, the longest prefix whose coin falls below it, and its residual."""
    rng = np.random.default_rng(seed)
    target, draft = rng.dirichlet(np.full(6, 0.6), length + 1), rng.dirichlet(np.full(6, 0.6), length)
    tokens = [int(rng.choice(6, p=row)) for row in draft]
    point = np.eye(6)[tokens]
    q, coin = (draft if sampled else point), rng.random(length + 1)
    ratio, h, residual = [1.0], [], []
    for i, token in enumerate(tokens):
        residual.append(np.maximum(ratio[-1] * target[i] - q[i], 0))
        ratio.append(min(1.0, ratio[-1] * target[i][token] / q[i][token]))
    for i in range(1, length + 1):
        mass = residual[i].sum() if i < length else 0
        h.append(ratio[i] if i == length else mass / (mass + 1 - ratio[i]) if mass + 1 - ratio[i] > 0 else 1.0)
    accepted = max((i for i in range(1, length + 1) if coin[i] < h[i - 1]), default=0)
    drawn = Drawn.WITHOUT_REPLACEMENT if sampled else Drawn.DETERMINISTIC
    tree = DraftTree.build(tokens, list(range(-1, length - 1)), drawn=drawn)
    given_q = {i - 1: dense(draft[i]) for i in range(length)} if sampled else {}
    (verdict,), (left,) = traversal.verify(batch_of(tree, [dense(row) for row in target], given_q, coin), BLOCK)
    assert verdict.path.tolist() == list(range(accepted))
    assert verdict.rule == BLOCK
    wanted = target[length] if accepted == length else residual[accepted] / residual[accepted].sum()
    np.testing.assert_allclose(left.row.numpy(), wanted, atol=1e-12)
    for node in np.flatnonzero(verdict.judged):
        assert verdict.accept_prob[node] == pytest.approx(h[node], abs=1e-9)


# All rules alike


@given(st.integers(0, 2**32 - 1), st.sampled_from(list(Drawn)), st.booleans())
@settings(max_examples=100, deadline=None)
def test_of_a_greedy_target_every_rule_accepts_the_same(seed, drawn, forced):
    rng = np.random.default_rng(seed)
    one, p = random_input(rng, drawn, True, 0.0)
    batch = batch_of(one.tree, [row.token for row in p], one.q, one.coin, greedy=True)
    (standard,) = host.verify(batch)
    for verify in (traversal.verify, match.verify):
        (found,), _ = verify(batch)
        assert found.path.tolist() == standard.path.tolist()
        assert (found.token, found.kind) == (standard.token, standard.kind)


@pytest.mark.parametrize(("verify", "rule"), [(traversal.verify, TRAVERSAL), (match.verify, MATCH)])
@given(seed=st.integers(0, 2**32 - 1), drawn=st.sampled_from(list(Drawn)), greedy=st.booleans())
@settings(max_examples=60, deadline=None)
def test_forced_outcomes_are_kept(verify, rule, seed, drawn, greedy):
    """A node that is forced rejected is on no path; one that is forced accepted is, where its turn came."""
    rng = np.random.default_rng(seed)
    one, p = random_input(rng, drawn, False, 0.5)
    batch = VerifyBatch.build([one], TargetRows(torch.zeros(0, dtype=torch.int64), torch.stack([r.probs for r in p])))
    (found,), _ = verify(batch, rule) if rule == TRAVERSAL else verify(batch)
    for node, accepted in one.forced.items():
        if found.outcome[node] != Outcome.UNTRIED:
            assert (node in found.path) is accepted
            assert node in found.forced
    assert one.final is None or found.token == one.final
    assert found.rule == rule


def test_a_forced_rejection_under_match_leaves_elder_siblings_alone():
    p = [dense([0.1, 0.4, 0.5])] * 3
    tree = DraftTree.build([1, 2], [ROOT, ROOT])
    (free,), _ = match.verify(batch_of(tree, p, {}, [0.5, 0.8, 0.5]))
    assert free.path.tolist() == [1]
    (found,), (left,) = match.verify(batch_of(tree, p, {}, [0.5, 0.8, 0.5], {1: False}))
    assert (found.path.tolist(), found.token, found.forced.tolist()) == ([], 0, [1])
    assert left.row.tolist() == [1, 0, 0]
    (other,), _ = match.verify(batch_of(tree, p, {}, [0.5, 0.3, 0.5], {1: False}))
    assert (other.path.tolist(), other.forced.tolist()) == ([0], [])  # its turn never came


def test_rounding_could_flip_a_node_of_a_path_although_its_own_p_is_1():
    tree = DraftTree.build([0, 0], [ROOT, 0])
    p = [dense([0.5, 0.5]), dense([1.0, 0.0]), dense([1.0, 0.0])]
    (found,), _ = traversal.verify(batch_of(tree, p, {}, [0.5, 0.9, 0.5 - 1e-9]))
    assert found.margin.tolist() == pytest.approx([1.0, 1e-9])
    assert 1 in found.near_ties("bfloat16")


def test_a_later_coin_accepts_past_a_failing_one():
    p = [dense([0.5, 0.5]), dense([0.9, 0.1]), dense([1.0, 0.0])]
    tree = DraftTree.build([0, 0], [ROOT, 0])
    coin = [0.5, 0.99, 0.4]  # the first node's own coin would never accept it
    (standard,) = host.verify(batch_of(tree, p, {}, coin))
    (found,), _ = traversal.verify(batch_of(tree, p, {}, coin))
    assert standard.path.tolist() == []
    assert found.path.tolist() == [0, 1]
    assert found.judged.tolist() == [False, True]
    assert found.accept_prob.tolist() == pytest.approx([0.5, 0.45])
    assert found.margin.tolist() == pytest.approx([1.0, 0.05])


def test_what_lies_below_a_path_of_ratio_0_is_not_tried():
    p = [dense([0.0, 1.0])] * 4
    tree = DraftTree.build([0, 0, 1], [ROOT, 0, ROOT])
    (found,), (left,) = traversal.verify(batch_of(tree, p, {}, [0.5] * 4))
    assert found.outcome.tolist() == [Outcome.REJECTED, Outcome.UNTRIED, Outcome.ACCEPTED]
    assert isinstance(left, Residual)


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
        ((verdict, notes),) = Verifier(backend, notes=True, rule=rule).verify(
            [(context, Draft(tree), logits.to(where))]
        )
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
    ((wanted, of_host),) = Verifier(Backend.TORCH, notes=True).verify([(context, Draft(tree, {ROOT: q}), logits)])
    rows = inputs.target_rows([context.rows(logits, list)], Memory())
    on_device = TargetRows(rows.choices.as_subclass(OnDevice), rows.p.as_subclass(OnDevice))
    monkeypatch.setattr(inputs, "target_rows", lambda parts, memory: on_device)
    draft = Draft(tree, {ROOT: q.as_subclass(OnDevice)})
    ((verdict, notes),) = Verifier(Backend.TORCH, notes=True).verify([(context, draft, logits)])
    assert verdict == wanted
    assert notes == of_host
