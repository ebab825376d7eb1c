"""V2's tensors, with the shapes that vLLM's code gives them: the same decisions told by V1's give the same evidence."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.trace.inside.chain import of_step, uniform
from specscope.trace.inside.gather import gather
from specscope.trace.inside.gathered import read
from specscope.trace.record.records import FinalKind
from specscope.vllm.v2.rows import Verified, rows_of_verified
from tests.vllm.judging import judge
from tests.vllm.random_calls import call
from tests.vllm.test_device import assert_same

SLOTS = 8


def states(slots, temperatures, seeds):
    """vLLM's SamplingStates, by slot: what lies in the other slots is no request's."""
    heat, seed = torch.full((SLOTS,), 9.0), torch.full((SLOTS,), 99)
    heat[slots], seed[slots] = torch.tensor(temperatures), torch.tensor(seeds)
    both = {"temperature": heat, "seeds": seed}
    return SimpleNamespace(**{name: SimpleNamespace(gpu=one, np=one.numpy()) for name, one in both.items()})


def verified(made, temperatures, **others):
    """The same call as V2 has it: rows of a request together, slots for requests, garbage where nothing is written."""
    drafted, tokens = made.drafted, made.logits.shape[1]
    longest = max(drafted)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))[: len(drafted)]
    cu = torch.tensor([0, *np.cumsum([n + 1 for n in drafted])], dtype=torch.int32)
    place = torch.cat([torch.arange(n + 1) for n in drafted])
    processed = made.logits.clone()
    processed[made.target_rows.long()] = made.target_logits
    if made.bonus_logits is not None:
        cool = torch.tensor(temperatures) == 0
        behind = torch.where(cool[:, None], made.bonus_logits, made._behind(0, len(drafted)))
        processed[made.bonus_rows.long()] = behind
    fed = torch.full((len(made.logits),), 1, dtype=torch.int32)
    fed[place > 0] = made.draft_tokens.int()
    own = None
    if made.draft_probs is not None:
        own = torch.full((SLOTS, longest, tokens), torch.nan)
        of = torch.repeat_interleave(torch.arange(len(drafted)), torch.tensor(drafted))
        heat = torch.tensor(temperatures)[of, None]
        own[slots[of], place[place > 0] - 1] = made.draft_probs.log() * torch.where(heat == 0, 1, heat)
    garbage = torch.where(made.output < 0, 10**9, made.output).long()
    return Verified(
        logits=made.logits,
        processed=processed,
        draft_logits=own,
        tokens=fed,
        pos=100 + torch.arange(len(made.logits)),
        cu_num_logits=cu,
        idx_mapping=slots,
        idx_mapping_np=slots.numpy(),
        expanded_idx_mapping=slots[torch.repeat_interleave(torch.arange(len(drafted)), cu.diff().long())],
        expanded_local_pos=place,
        sampled=garbage,
        num_sampled=(made.output >= 0).sum(1).int(),
        states=states(slots, temperatures, [7 + one for one in range(len(drafted))]),
        **others,
    )


def numbers(one):
    return read(gather(rows_of_verified(one), full=True).tables())


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    requests=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.7, 1.3])), min_size=1, max_size=4).filter(
        lambda some: any(n for n, _ in some)
    ),
    draft_probs=st.booleans(),
    top_p=st.sampled_from([None, 0.6]),
)
def test_the_same_decisions_are_the_same_evidence(seed, requests, draft_probs, top_p):
    drafted, heat = [n for n, _ in requests], [temperature for _, temperature in requests]
    made = call(seed, drafted, heat, tokens=20, draft_probs=draft_probs, top_p=top_p)
    v2 = verified(made, heat)
    slots, first = v2.idx_mapping, v2.cu_num_logits
    for request, there in enumerate(numbers(v2)):
        own = []
        if v2.draft_logits is not None:
            own = list(v2.draft_logits[slots[request], : drafted[request]])
        here = judge(made, request, own, full=True)
        coins = uniform(np.full(drafted[request], 7 + request), 100 + int(first[request]) + np.arange(drafted[request]))
        here.verdict.coin[:] = 0 if heat[request] == 0 else coins
        assert_same(here, there, f"request {request}")


def test_a_draft_that_is_invalid_takes_nothing_from_the_target():
    """V2 draws the token behind it from p itself, where V1 takes q away."""
    made = call(11, [3], [1.0], tokens=12, draft_probs=True)
    made.draft_tokens[0] = -1
    made.output = torch.tensor([[5, -1, -1, -1]], dtype=torch.int32)
    (one,) = numbers(verified(made, [1.0]))
    assert one.invalid == 3
    assert one.verdict.kind is FinalKind.TARGET
    assert one.verdict.final_p == pytest.approx(float(made.target_probs[0, 5]), rel=1e-5)


def test_only_the_device_knows_how_many_were_verified():
    """With an adaptive budget the host's counts are too high, and those of cu_num_logits on the device true."""
    made = call(4, [1, 3, 0], [0.0, 0.9, 0.9], tokens=12, draft_probs=False)
    confidence = torch.rand(SLOTS, 5, generator=torch.Generator().manual_seed(0))
    v2 = verified(made, [0.0, 0.9, 0.9], confidence=confidence)
    found = numbers(v2)
    assert [len(one.tree) for one in found] == [1, 3, 0]
    for one, slot in zip(found, v2.idx_mapping, strict=True):
        np.testing.assert_array_equal(one.confidence, confidence[slot, : len(one.tree)])


def exact_block(p, q, tokens):
    """h of each draft in plain Python, from whole distributions p[i] and q[i] (Sun et al., 2024, algorithm 2)."""
    ratio, found = 1.0, []
    for at, token in enumerate(tokens):
        ratio = min(ratio * p[at][token] / q[at][token], 1)
        if at + 1 == len(tokens):
            found.append(ratio)
            continue
        mass = sum(max(ratio * a - b, 0) for a, b in zip(p[at + 1], q[at + 1], strict=True))
        found.append(mass / (mass + 1 - ratio) if mass + 1 - ratio > 0 else 1)
    return found


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("step_seeds", [True, False], ids=["0.33", "0.32"])
def test_block_verification(draft_probs, step_seeds):
    """Each draft is accepted by h, with a coin of its own seed since 0.33."""
    made = call(8, [4, 2, 1], [0.8, 1.0, 0.0], tokens=12, draft_probs=draft_probs)
    v2 = verified(made, [0.8, 1.0, 0.0], by_block=True, step_seeds=step_seeds)
    first = 0
    for request, (n, one) in enumerate(zip([4, 2], numbers(v2)[:2], strict=True)):
        tokens, p = made.draft_tokens[first : first + n].tolist(), made.target_probs[first : first + n].double()
        q = torch.nn.functional.one_hot(torch.tensor(tokens), 12).double()
        if draft_probs:
            q = made.draft_probs[first : first + n].double()
        tried = one.verdict.outcome > 0
        wanted = np.array(exact_block(p.tolist(), q.tolist(), tokens))
        np.testing.assert_allclose(one.verdict.accept_prob[tried], wanted[tried], rtol=1e-4)
        seeds = of_step(np.full(n, 7 + request), np.arange(n) if step_seeds else np.zeros(n, np.int64))
        positions = 100 + int(v2.cu_num_logits[request]) + np.arange(n)
        np.testing.assert_array_equal(one.verdict.coin, uniform(seeds, positions))
        first += n
