"""Losslessness by exact enumeration, and every known mistake put in on purpose and caught."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.verify.distribution import DrafterRow, Residual
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.tree_shape import parse_tree
from tests.speculate.verify import book, enumeration
from tests.speculate.verify.book import Dense, OneHot
from tests.speculate.verify.enumeration import SHAPES, Model, dense, sampled_children, total_variation
from tests.speculate.verify.oracle import judge, verify

ACCEPT, REJECT = 1e-300, 1 - 2.0**-53


def coin_outcomes(tree, p, q):
    """Every outcome of the coins: (probability, judgement), by following the trials as `judge` makes them."""

    def explore(forced: dict[int, bool], weight: float):
        coin = [ACCEPT if forced.get(node) else REJECT for node in range(len(tree))]
        judgement = judge(tree, p, q, coin)
        fresh = next((node for node in judgement.outcome if node not in forced), None)
        if fresh is None:
            yield weight, judgement.path, judgement.left.probs.numpy()
            return
        accept = judgement.accept_prob[fresh]
        if accept > 0:
            yield from explore(forced | {fresh: True}, weight * accept)
        if accept < 1:
            yield from explore(forced | {fresh: False}, weight * (1 - accept))

    yield from explore({}, 1.0)


@pytest.mark.parametrize("drawn", list(Drawn), ids=lambda d: d.name.lower())
@pytest.mark.parametrize(("text", "vocab"), SHAPES)
def test_what_is_emitted_has_the_targets_distribution(text, vocab, drawn):
    """Total variation from the target, over every draw and coin outcome, for many random p and q."""
    worst = max(total_variation(parse_tree(text), seed, vocab, drawn, coin_outcomes) for seed in range(6))
    assert worst < 1e-12


def worst_of(shape="2x1", vocab=5, drawn=Drawn.WITHOUT_REPLACEMENT, rearrange=lambda tree, q: tree):
    return max(total_variation(parse_tree(shape), seed, vocab, drawn, coin_outcomes, rearrange) for seed in range(6))


def test_mistake_ratio_test_on_deterministic_top_k_is_caught(monkeypatch):
    def top_k(q, count, drawn):
        yield from sampled_children(q, count, Drawn.DETERMINISTIC)

    monkeypatch.setattr(enumeration, "sampled_children", top_k)
    assert worst_of() > 0.05


def test_mistake_siblings_sorted_by_q_after_sampling_is_caught():
    def sort_siblings(tree, q):
        order = np.argsort([-q[ROOT].prob(int(t)) for t in tree.token], kind="stable")
        return DraftTree.build(tree.token[order], tree.parent, drawn=Drawn.WITHOUT_REPLACEMENT)

    assert worst_of(rearrange=sort_siblings) > 0.05


def test_mistake_pruning_a_sampled_sibling_is_caught():
    def prune_least_likely(tree, q):
        kept = int(np.argmax([q[ROOT].prob(int(t)) for t in tree.token]))
        return DraftTree.build([tree.token[kept]], [ROOT], drawn=Drawn.WITHOUT_REPLACEMENT)

    assert worst_of(rearrange=prune_least_likely) > 0.05


def test_mistake_residual_not_renormalised_is_caught(monkeypatch):
    def residual(self, other):
        left = (self.probs - other.probs).clamp(min=0)
        return Dense(left), float(left.sum())

    monkeypatch.setattr(book, "residual", residual)
    assert worst_of() > 0.05


def test_mistake_q_not_renormalised_without_replacement_is_caught(monkeypatch):
    def without(self, token):
        left = self.probs.clone()
        left[token] = 0
        return Dense(left), float(left.sum())

    monkeypatch.setattr(book, "without", without)
    assert worst_of("3x1") > 0.05


def test_mistake_residual_forgotten_is_caught(monkeypatch):
    monkeypatch.setattr(book, "residual", lambda self, other: (self, 1.0))
    assert worst_of() > 0.05


# The verdict and its evidence


def test_greedy_accepts_the_targets_tokens_and_recovers_with_its_choice():
    tree = DraftTree.build([7, 3, 9, 4], [ROOT, ROOT, 1, 2])
    p = [OneHot(3), OneHot(0), OneHot(9), OneHot(5), OneHot(8)]
    verdict = verify(tree, p, {}, np.full(5, 0.5))
    assert verdict.path.tolist() == [1, 2]
    assert (verdict.token, verdict.kind) == (5, FinalKind.RECOVERED)
    assert verdict.outcome.tolist() == [Outcome.REJECTED, Outcome.ACCEPTED, Outcome.ACCEPTED, Outcome.REJECTED]
    assert verdict.p.tolist() == [0, 1, 1, 0]


def test_kinds_of_final_tokens():
    nothing = verify(DraftTree.empty(), [OneHot(3)], {}, np.array([0.5]))
    assert (nothing.token, nothing.kind, nothing.accepted) == (3, FinalKind.TARGET, 0)
    whole = verify(DraftTree.build([3], [ROOT]), [OneHot(3), OneHot(4)], {}, np.full(2, 0.5))
    assert (whole.token, whole.kind) == (4, FinalKind.BONUS)
    # An accepted leaf that is not the deepest: its bonus comes from its own row.
    tree = DraftTree.build([1, 3, 5], [ROOT, ROOT, 0])
    shallow = verify(tree, [OneHot(3), OneHot(9), OneHot(4), OneHot(9)], {}, np.full(4, 0.5))
    assert (shallow.token, shallow.kind, shallow.path.tolist()) == (4, FinalKind.BONUS, [1])
    assert shallow.outcome.tolist() == [Outcome.REJECTED, Outcome.ACCEPTED, Outcome.UNTRIED]


@given(st.integers(0, 10_000))
def test_a_verdict_can_be_recomputed_from_its_evidence(seed):
    """accept_prob follows from p_i and q_i, outcomes from the coins, q_i and residual mass from p and q alone."""
    p_model, q_model = Model(6, seed), Model(6, seed + 77)
    q = dense(q_model(()))
    left, tokens = q, []
    for coin in coins(seed, Stream.DRAFT, 0, 3):
        tokens.append(book.draw(left, float(coin))[0])
        left, _ = book.without(left, tokens[-1])
    tree = DraftTree.build(tokens, [ROOT] * 3, [q.prob(t) for t in tokens], Drawn.WITHOUT_REPLACEMENT)
    p = [dense(p_model(())), *(dense(p_model((t,))) for t in tokens)]
    verdict = verify(tree, p, {ROOT: q}, coins(seed, Stream.VERIFY, 0, 4))
    p_left, q_left = p_model(()), q_model(())
    for node, token in enumerate(tokens):
        if verdict.outcome[node] == Outcome.UNTRIED:
            assert verdict.path.tolist() == [0] or verdict.path[0] < node
            continue
        assert verdict.p_trial[node] == pytest.approx(p_left[token], rel=1e-5, abs=1e-7)
        assert verdict.q_trial[node] == pytest.approx(q_left[token], rel=1e-5, abs=1e-7)
        assert verdict.accept_prob[node] == pytest.approx(min(1, p_left[token] / q_left[token]), rel=1e-4)
        accepted = verdict.coin[node] < verdict.accept_prob[node]
        assert verdict.outcome[node] == (Outcome.ACCEPTED if accepted else Outcome.REJECTED)
        p_left = np.maximum(p_left - q_left, 0)
        if not accepted:
            assert verdict.residual_mass[node] == pytest.approx(p_left.sum(), rel=1e-5)
        p_left /= p_left.sum()
        q_left = np.where(np.arange(6) == token, 0, q_left)
        q_left /= q_left.sum()


def test_a_residual_of_zeros_falls_back_to_p_and_never_gives_nan():
    p = q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float32)
    left, mass = Residual(p).reject(0, DrafterRow(q))
    assert mass == 0
    assert torch.equal(left.row, p)
    left, mass = Residual(torch.tensor([1.0, 0.0])).reject(0, None)
    assert mass == 0
    assert not left.row.isnan().any()


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20).filter(sum), st.floats(2**-54, 1 - 2**-53))
def test_a_draw_never_gives_a_token_of_probability_zero(weights, coin):
    row = torch.tensor(weights, dtype=torch.float32)
    row = row / row.sum()
    if row.isnan().any():
        return
    assert row[book.draw(Dense(row), coin)[0]] > 0


def test_draws_follow_the_distribution():
    row = torch.tensor([0.1, 0.0, 0.6, 0.3])
    made = np.bincount([book.draw(Dense(row), u)[0] for u in (np.arange(1000) + 0.5) / 1000], minlength=4)
    assert made.tolist() == [100, 0, 600, 300]


def test_a_decreed_verdict_says_so_and_keeps_the_true_evidence():
    tree = DraftTree.build([1, 2, 3], [ROOT, ROOT, 0])
    p = [Dense(torch.tensor([0.1, 0.2, 0.3, 0.4]))] * 4
    coin = np.array([0.5, 0.01, 0.99, 0.01])
    free = verify(tree, p, {}, coin)
    assert free.path.tolist() == [0, 2]
    assert free.forced.tolist() == []
    forced = verify(tree, p, {}, coin, {0: False, 1: True}, final=2)
    assert forced.path.tolist() == [1]
    assert forced.forced.tolist() == [0, 1, 3]
    assert forced.token == 2
    assert forced.kind is FinalKind.BONUS
    assert forced.accept_prob[0] == free.accept_prob[0]
    assert forced.p_trial[1] == pytest.approx(0.3 / 0.8)
