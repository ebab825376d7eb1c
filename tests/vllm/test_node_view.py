"""A node's distributions inside vLLM, against plain torch on the same tensors."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.record.records import RequestStep
from specscope.vllm.node_view import view_node
from specscope.vllm.v1.sampler import SamplerHooks
from tests.vllm.fakes import fresh_sampler
from tests.vllm.judging import judge

V, COUNTS = 12, [3, 0, 2, 4]


def sampled(seed, *, greedy=False, drawn=False):
    """The sampler's call with its output, by the hooks."""
    module, hooks = fresh_sampler(), SamplerHooks(ErrorGuard())
    hooks.install(module)
    hooks.install_plain(module)
    hooks.listening = True
    generator = torch.Generator().manual_seed(seed)
    total, rows = sum(COUNTS), sum(COUNTS) + len(COUNTS)
    logits = torch.randn(rows, V, generator=generator) * 2
    ends = list(itertools.accumulate(count + 1 for count in COUNTS))
    judged = torch.tensor([row for row in range(rows) if row + 1 not in ends])
    q = (logits[judged] + torch.randn(total, V, generator=generator)).softmax(-1)  # a drafter that is close
    tokens = torch.multinomial(q, 1, generator=generator)[:, 0].int()
    metadata = SimpleNamespace(
        num_draft_tokens=COUNTS,
        draft_token_ids=tokens,
        target_logits_indices=judged,
        bonus_logits_indices=torch.tensor(ends) - 1,
    )
    sampling = SimpleNamespace(
        all_greedy=greedy,
        temperature=None if greedy else torch.full((len(COUNTS),), 0.7),
        top_k=None,
        top_p=None,
        generators=[generator],
    )
    module.RejectionSampler().forward(metadata, q if drawn else None, logits, sampling)
    return hooks.call


def seen(call, request, node, drafter=None):
    one = judge(call, request, [], full=True)
    part = RequestStep("r", 0, 5, 0, "draft_model", one.tree, one.verdict, 1)
    return view_node(call, request, 7, part, node, drafter)


@pytest.mark.parametrize("drawn", [False, True])
def test_the_columns_are_those_of_the_row_that_judged_the_node(drawn):
    call, drafter = sampled(2, drawn=drawn), torch.randn(V)
    drafter[3] = -torch.inf  # outside its vocabulary
    view = seen(call, 2, 1, drafter)
    row = sum(COUNTS[:2]) + 1
    raw, p, q = call.logits[call.target_rows[row]].softmax(-1), call.target_probs[row], drafter.softmax(-1)
    token = int(call.draft_tokens[row])
    for column, probs in ((view.raw, raw), (view.p, p), (view.draft, q)):
        assert column.prob == pytest.approx(float(probs[token]), abs=1e-6)
        assert column.entropy == pytest.approx(float(torch.special.entr(probs).sum()), abs=1e-5)
        assert column.top[0].token == int(probs.argmax())
        assert column.rank == (1 + int((probs > probs[token]).sum()) if probs[token] > 0 else None)
    assert view.draft.outside == (token == 3)
    assert view.tv == pytest.approx(float((raw - q).abs().sum() / 2), abs=1e-6)
    known = q > 0
    there = raw[known] / raw[known].sum()
    assert view.kl == pytest.approx(float((there * (there / q[known]).log()).sum()), abs=1e-5)
    assert (view.q is None) == (not drawn)
    if drawn:
        assert view.q.prob == pytest.approx(float(call.draft_probs[row, token]))
    assert not view.computed
    assert view.notes == ()


def test_a_greedy_target_has_all_of_p_at_one_token():
    call = sampled(2, greedy=True)
    view = seen(call, 0, 0)
    assert [one.prob for one in view.p.top] == [1.0]
    assert view.p.entropy == 0
    assert view.removed[0].rule == "temperature 0"
    assert view.removed[0].tokens == V - 1


def test_what_top_k_took_away_is_said():
    call = sampled(2)
    probs = call.target_probs[0]
    gone = probs < probs.topk(4).values[-1]
    mass = float(probs[gone].sum())
    call.target_probs[0] = torch.where(gone, 0.0, probs) / (1 - mass)
    call.top_k = torch.full((len(COUNTS),), 4)
    (removed,) = seen(call, 0, 0).removed
    assert (removed.rule, removed.tokens) == ("top-k 4", V - 4)
    assert removed.mass == pytest.approx(mass, abs=1e-5)


def test_numbers_that_are_not_those_that_were_judged_are_a_contradiction():
    call = sampled(2)
    one = judge(call, 0, [], full=True)
    part = RequestStep("r", 0, 5, 0, "ngram", one.tree, one.verdict, 1)
    call.target_probs[0] = torch.full((V,), 1 / V)
    assert "was judged with p" in view_node(call, 0, 7, part, 0, None).notes[0]
