"""What is read off a call of vLLM's sampler, against the same in plain float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.tree import Drawn
from tests.vllm.calls import V, call
from tests.vllm.judging import judge

tokens = st.lists(st.integers(0, V - 1), max_size=4)
batches = st.lists(st.tuples(tokens, st.sampled_from([0.0, 0.7, 1.0])), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(batches, st.booleans(), st.integers(0, 1000))
def test_every_number_is_the_sampler_s_own(batch, probabilistic, seed):
    drafts, temperature = [one for one, _ in batch], [t for _, t in batch]
    one = call(drafts, temperature=temperature, probabilistic=probabilistic, seed=seed)
    first = 0
    for at, drafted in enumerate(drafts):
        check(one, at, first, drafted, temperature[at])
        first += len(drafted)


def check(one, at, first, drafted, temperature):
    n = len(drafted)
    found = judge(one, at, [], full=True)
    tree, verdict = found.tree, found.verdict
    sampled = one.draft_probs is not None and temperature > 0
    out = one.output[at].tolist()
    accepted = sum(token >= 0 for token in out) - 1
    assert tree.token.tolist() == drafted
    assert tree.parent.tolist() == list(range(-1, n - 1))
    assert set(tree.drawn.tolist()) <= {Drawn.WITH_REPLACEMENT if sampled else Drawn.DETERMINISTIC}
    assert (verdict.accepted, verdict.token) == (accepted, out[accepted])
    assert verdict.kind is (FinalKind.TARGET if not n else FinalKind.BONUS if accepted == n else FinalKind.RECOVERED)
    assert verdict.outcome.tolist() == [
        Outcome.ACCEPTED if i < accepted else Outcome.REJECTED if i == accepted else Outcome.UNTRIED for i in range(n)
    ]
    for i, token in enumerate(drafted):
        logits = one.target_logits[first + i].double()
        p = logits.softmax(-1) if temperature else torch.nn.functional.one_hot(logits.argmax(), V).double()
        q = float(one.draft_probs[first + i, token]) if sampled else 1.0
        assert verdict.p[i] == pytest.approx(float(p[token]), rel=1e-5)
        assert tree.q[i] == pytest.approx(q, rel=1e-6)
        assert verdict.coin[i] == (float(one.coins[first + i]) if temperature else 0)
        if i <= accepted:
            assert verdict.accept_prob[i] == pytest.approx(min(1.0, float(p[token]) / q), rel=1e-5)
    if temperature and n and accepted < n:
        p = one.target_logits[first + accepted].double().softmax(-1)
        eye = torch.eye(V).double()[drafted[accepted]]
        left = (p - one.draft_probs[first + accepted].double()).clamp(min=0) if sampled else p * (1 - eye)
        assert verdict.residual_mass[accepted] == pytest.approx(float(left.sum()), rel=1e-4)
        assert verdict.final_p == pytest.approx(float(left[verdict.token] / left.sum()), rel=1e-4)
        assert found.parents.final_target_p == pytest.approx(float(p[verdict.token]), rel=1e-5)
    elif temperature:
        p = (one.logits[one.bonus_rows[at]].double() / temperature).softmax(-1)
        assert verdict.final_p == pytest.approx(float(p[verdict.token]), rel=1e-5)
        log = p.log()
        assert found.parents.final_entropy == pytest.approx(float(-(p * log).sum()), rel=1e-4)
    check_parents(one, first, found, min(accepted + 1, n))


def check_parents(one, first, found, tried):
    parents = found.parents
    assert parents.node.tolist() == list(range(-1, tried - 1))
    for i in range(tried):
        raw = one.logits[one.target_rows[first + i]].double().softmax(-1)
        top = raw.topk(4)
        assert parents.top[i].tolist() == top.indices.tolist()
        assert parents.top_p[i] == pytest.approx(top.values.numpy(), rel=1e-5)
        assert parents.raw_p[i] == pytest.approx(float(raw[found.tree.token[i]]), rel=1e-5)


def test_invalid_drafts_are_left_out_and_counted():
    one = call([[3, -1, -1], [4]], temperature=[0.8, 0.8])
    first, second = judge(one, 0, [], full=True), judge(one, 1, [], full=True)
    assert (first.tree.token.tolist(), first.invalid) == ([3], 2)
    assert (second.tree.token.tolist(), second.invalid) == ([4], 0)
    assert second.verdict.coin[0] == float(one.coins[3])


def test_a_draft_before_an_invalid_one_ends_with_the_target_s_token():
    """vLLM rejects the placeholder and draws from p there: behind the valid drafts that is a recovered token."""
    for seed in range(40):
        one = call([[3, -1]], temperature=[0.8], seed=seed)
        found = judge(one, 0, [], full=True)
        if found.verdict.accepted == 1:
            p = one.target_probs[1]
            assert found.verdict.final_p == pytest.approx(float(p[found.verdict.token]), rel=1e-5)
            return
    pytest.fail("no seed accepted the first draft")


def test_what_the_drafter_gave():
    one = call([[3, 4]], temperature=[0.0], seed=4)
    logits = [torch.randn(V), torch.randn(V)]
    logits[0][7:] = -torch.inf  # a reduced vocabulary
    found = judge(one, 0, logits, full=True)
    own = [row.double().softmax(-1) for row in logits]
    assert found.notes.prob == pytest.approx([float(own[0][3]), float(own[1][4])], rel=1e-5)
    assert found.notes.score == pytest.approx(np.cumsum(np.log(found.notes.prob)), rel=1e-4)
    raw = one.logits[0].double().softmax(-1)
    assert found.parents.outside[0] == pytest.approx(float(raw[7:].sum()), rel=1e-4)
    assert found.parents.draft_top[0].tolist() == own[0].topk(4).indices.tolist()


def test_lean_evidence_has_no_notes():
    found = judge(call([[3]], temperature=[0.8]), 0, [torch.randn(V)], full=False)
    assert found.parents is None
    assert found.notes is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("probabilistic", [False, True])
def test_what_is_no_number_stays_none(temperature, probabilistic):
    """Of logits that are NaN there is no p, greedy or sampled: min(1, NaN) is 1 to Python, and argmax gives a token."""
    one = call([[3, 4]], temperature=[temperature], probabilistic=probabilistic)
    one.target_logits[0] = one.logits[0] = torch.nan
    if temperature:
        one.target_probs[0] = torch.nan
    one.output = torch.tensor([[5, -1, -1]], dtype=torch.int32)
    verdict, parents = (found := judge(one, 0, [], full=True)).verdict, found.parents
    assert np.isnan(verdict.p).tolist() == [True, False]
    assert np.isnan(verdict.p_trial[0])
    assert np.isnan(verdict.accept_prob[0])
    assert np.isnan(parents.raw_p[0])


def test_a_q_that_is_no_number_stays_none():
    one = call([[3, 4]], temperature=[0.8], probabilistic=True)
    one.draft_probs[0] = torch.nan
    found = judge(one, 0, [], full=True)
    assert np.isnan(found.tree.q[0])
    assert np.isnan(found.verdict.accept_prob[0])


def test_the_target_s_choice_is_its_own_whatever_was_accepted():
    """An engine that accepts a wrong draft was said to have chosen it."""
    one = call([[3, 4]], temperature=[0.0])
    one.target_logits[0, 7] = one.logits[0, 7] = 50
    one.output = torch.tensor([[3, 5, -1]], dtype=torch.int32)  # 3 was accepted, and the target's choice is 7
    found = judge(one, 0, [], full=True)
    assert found.verdict.accepted == 1
    assert found.verdict.p[0] == 0
    assert found.parents.choice[0] == 7


def test_a_recovered_token_that_is_not_the_target_s_choice_has_no_p():
    one = call([[3, 4]], temperature=[0.0])
    one.target_logits[0, 7] = one.logits[0, 7] = 50
    one.output = torch.tensor([[5, -1, -1]], dtype=torch.int32)
    found = judge(one, 0, [], full=True)
    assert found.verdict.final_p == found.parents.final_target_p == 0
    one.output = torch.tensor([[7, -1, -1]], dtype=torch.int32)
    assert judge(one, 0, [], full=True).verdict.final_p == 1
