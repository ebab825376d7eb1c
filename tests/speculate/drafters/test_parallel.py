"""P-EAGLE heads through the engine: one pass a draft, the same tokens as plain decoding, and nothing that stays."""

import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.plans.plan import parse_plan
from specscope.speculate.drafters import eagle
from specscope.speculate.drafters.eagle import with_masks
from specscope.trace.record.tree import ROOT, DraftTree
from tests.heads import Reference, head_tensors, write_parallel_head

PROMPTS = ["abcabcabcab", "hello hello hel", "x", "the cat sat on the mat, the cat", "1 2 3 1 2 3 1 2"]
TREES = ["4", "3x3", "[(0,), (1,), (0, 0), (0, 1), (1, 0)]", "top:2x3", "dynamic:12,depth=4,top=3"]
MASK = 7
KNOWN = (head_tensors()["d2t"] + torch.arange(60)).tolist()  # under this bias four tokens are left, and some agree
BIAS = dict.fromkeys((KNOWN[53], KNOWN[25], KNOWN[45], KNOWN[52]), 1000)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write_parallel_head(tmp_path_factory.mktemp("head"), mask_token=MASK)


@pytest.fixture(scope="module")
def make(deep, head):
    def make(tree="4", **more):
        drafting = {"drafter": "none"} if tree is None else {"draft_model": str(head), "tree": tree}
        return Engine(target=str(deep), dtype="float32", **drafting, **{"kv_memory": 0.01, **more})

    return make


def greedy(bias=False, **more):
    return SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=BIAS if bias else {}, **more)


@pytest.fixture(scope="module")
def hugging(deep):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32)


def features_of(hugging, engine, tokens):
    with torch.inference_mode():
        states = hugging(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in engine.drafter.aux_layers], dim=-1)


def test_a_mask_row_sees_the_committed_pairs_and_the_mask_rows_before_it():
    """Two pending pairs behind three that are cached, and two mask rows: by hand."""
    pairs = Segment.of_tree(BlockTable(), 3, [11, 12], DraftTree.empty(), logits=True)
    segment = with_masks(pairs, 2, MASK)
    assert segment.tokens == [11, 12, MASK, MASK]
    assert segment.context == 3  # every row sees them
    assert segment.positions.tolist() == [3, 4, 5, 6]
    assert segment.mask.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert list(segment.wanted) == [1, 2, 3]  # the root's pair and both masks
    assert with_masks(pairs, 0, MASK).wanted == range(1, 2)


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("bias", [False, True])
def test_a_chain_is_what_one_pass_of_the_head_says(make, head, hugging, monkeypatch, bias, chunk):
    """Every drafted token against the head run densely, on what transformers says of the committed tokens.

    It would differ as soon as a mask row stayed in the cache.
    """
    monkeypatch.setattr(eagle, "PREFILL_CHUNK", chunk)
    engine, length = make("4", max_step_tokens=40), 4
    results = engine.generate(PROMPTS, greedy(bias))
    reference = Reference(head, hugging.model.embed_tokens.weight)
    accepted = set()
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = engine.encode(prompt)[1] + result.token_ids
        features = features_of(hugging, engine, tokens)
        for step in (step for step in result.steps if len(step.tree)):
            known = step.context_len + step.prefill_tokens + 1
            rows = reference.one_pass(tokens[:known], features, length, MASK)
            full = torch.stack([reference.full(row) for row in rows])
            for token, value in (BIAS if bias else {}).items():
                full[:, token] += value
            assert step.tree.token.tolist() == full.argmax(-1).tolist()
            accepted.add(step.verdict.accepted)
    assert accepted >= ({0, 1, 2} if bias else {0})


def test_a_row_that_somebody_looks_at_is_its_depths(make):
    engine = make("3x3")
    drafts = []
    real = engine.drafter.propose
    engine.drafter.propose = lambda contexts: drafts.extend(real(contexts)) or drafts[-len(contexts) :]
    engine.generate("the cat", greedy())
    draft = next(d for d in drafts if len(d.tree))
    first, other = draft.tree.children(ROOT)[:2]
    rows = [draft.row([int(draft.tree.token[n])]).logits for n in (first, other)]
    assert torch.equal(*rows)
    assert not torch.equal(draft.row([]).logits, rows[0])


def test_plan_depths_decide_how_many_rows_are_fed(make):
    engine = make("dynamic:4,depth=2,top=4")
    assert parse_plan("dynamic:4,depth=2,top=4").max_depth == 2
    (result,) = engine.generate("the cat", greedy())
    steps = [s for s in result.steps if len(s.tree)]
    assert all(int(s.notes.rows[0]) == len(s.notes.fed_token) + 1 for s in steps)
    assert engine.drafter.runner.head.config.mask_token is not None
