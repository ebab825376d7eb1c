"""Forced outcomes: what vLLM's own sampler gives where the coin of a node is another one."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from specscope.errors import UserError
from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.record.records import FinalKind, Outcome
from specscope.vllm.call import Forced
from specscope.vllm.v1.forced import force, parse
from specscope.vllm.v1.sampler import SamplerHooks
from tests.vllm.fakes import fresh_sampler
from tests.vllm.judging import judge

V, COUNTS = 12, [3, 0, 2, 4]
BIG = 1e9
NODES = [(request, node) for request, count in enumerate(COUNTS) for node in range(count)]


def sampled(seed, *, greedy=False, drawn=False, coins=None, drafts=None):
    """(the sampler's call with its output, by the hooks). `coins`: what to put in place of some, by draft."""
    module, hooks = fresh_sampler(), SamplerHooks(ErrorGuard())
    if coins:
        honest = module.generate_uniform_probs

        def forged(*args):
            found = honest(*args)
            for draft, coin in coins.items():
                found[draft] = coin
            return found

        module.generate_uniform_probs = forged
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
        draft_token_ids=tokens if drafts is None else drafts(tokens),
        target_logits_indices=judged,
        bonus_logits_indices=torch.tensor(ends) - 1,
    )
    sampling = SimpleNamespace(
        all_greedy=greedy,
        temperature=None if greedy else torch.full((len(COUNTS),), 0.7),
        top_k=None,
        top_p=None,
        generators=[generator],
        logprobs=None,
    )
    module.RejectionSampler().forward(metadata, q if drawn else None, logits, sampling)
    return hooks.call


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_forced_outcome_is_what_another_coin_would_have_given(seed, drawn):
    """Coin 0 accepts whatever has any p, and a big one rejects: everything behind is vLLM's own with the same noise."""
    tried = 0
    for request, node in NODES:
        for accept in (True, False):
            call = sampled(seed, drawn=drawn)
            before = call.output.clone()
            if int((before[request] >= 0).sum()) - 1 < node:
                with pytest.raises(UserError, match="is not tried"):
                    force(call, request, Forced({node: accept}))
                assert torch.equal(call.output, before)
                continue
            force(call, request, Forced({node: accept}))
            tried += 1
            draft = sum(COUNTS[:request]) + node
            expected = sampled(seed, drawn=drawn, coins={draft: 0.0 if accept else BIG}).output
            assert torch.equal(call.output, expected)
    assert tried >= 2 * sum(count > 0 for count in COUNTS)  # the first node of each is


@pytest.mark.parametrize("seed", range(6))
def test_the_evidence_of_a_forced_outcome_agrees_with_what_vllm_goes_on_with(seed):
    for request, node in NODES:
        call = sampled(seed, drawn=True)
        before = judge(call, request, [], full=True)
        if int((call.output[request] >= 0).sum()) - 1 < node:  # it is not tried
            continue
        force(call, request, Forced({node: True}, token=3))
        one = judge(call, request, [], full=True)
        row = [token for token in call.output[request].tolist() if token >= 0]
        assert [*one.tree.token[one.verdict.path].tolist(), one.verdict.token] == row
        assert row[-1] == 3
        assert one.verdict.forced.tolist() == [node, COUNTS[request]]
        assert one.verdict.outcome[node] == Outcome.ACCEPTED
        assert (one.verdict.coin == before.verdict.coin).all()
        assert (one.verdict.p == before.verdict.p).all()
        assert one.verdict.kind is (FinalKind.BONUS if len(row) > COUNTS[request] else FinalKind.RECOVERED)


def test_a_greedy_target_keeps_its_choice():
    """As in our own engine: all of p is at one token, and nothing is left of it without."""
    for seed in range(20):
        call = sampled(seed, greedy=True)
        own = [token for token in call.output[0].tolist() if token >= 0]
        if len(own) == 1:
            continue
        force(call, 0, Forced({0: False}))
        one = judge(call, 0, [], full=True)
        assert call.output[0].tolist() == [own[0], -1, -1, -1, -1]
        assert one.verdict.kind is FinalKind.RECOVERED
        assert one.verdict.residual_mass[0] == 0
        assert one.parents.choice[0] == own[0]
        return
    pytest.fail("no seed accepts a draft")


def test_a_forced_token_of_a_greedy_target_has_no_probability():
    call = sampled(1, greedy=True)
    own = int(call.output[1, 0])
    force(call, 1, Forced(token=(own + 1) % V))
    assert judge(call, 1, [], full=True).verdict.final_p == 0
    force(call, 1, Forced(token=own))
    assert judge(call, 1, [], full=True).verdict.final_p == 1


def test_forcing_again_begins_with_what_vllm_gave():
    call = sampled(3)
    own = call.output[0].clone()
    rejected = int((own >= 0).sum()) - 1
    assert rejected < COUNTS[0]
    force(call, 0, parse([f"accept={rejected}"], Forced()))
    accepted = call.output[0].clone()
    assert not torch.equal(accepted, own)
    force(call, 0, parse([f"reject={rejected}"], call.forced[0]))
    assert torch.equal(call.output[0], own)


def test_an_invalid_draft_is_no_node():
    """vLLM marks a draft that a grammar refuses with -1."""

    def spoil(tokens):
        tokens = tokens.clone()
        tokens[1] = -1
        return tokens

    call = sampled(3, drafts=spoil, coins={0: BIG})
    with pytest.raises(UserError, match="there is no node 1: 1 node drafted"):
        force(call, 0, Forced({1: True}))
    force(call, 0, Forced({0: True}))
    assert call.output[0].tolist() == [int(call.draft_tokens[0]), int(call.recovered[1]), -1, -1, -1]


@pytest.mark.parametrize("words", [["accept"], ["accept=-1"], ["token=1.5"], ["p=1"], ["accept=1", "x"]])
def test_bad_words_are_refused(words):
    with pytest.raises(UserError, match="write accept=NODE"):
        parse(words, Forced())
