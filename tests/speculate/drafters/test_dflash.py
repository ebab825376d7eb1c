"""DFlash heads through the engine: one pass a draft, the reference's drafts token for token, and nothing that stays.

Reference: transformers' own generator and model class. Sampled drafts are audited in tests/engine/test_invariances.py.
"""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from tests.dflash import VARIANTS, assistant, dflash_tensors, write_dflash
from tests.model.test_architectures import build
from tests.tiny import write_tiny_model

PROMPTS = ["abcabcabcab", "hello hello hel", "x", "the cat sat on the mat, the cat", "1 2 3 1 2 3 1 2"]


def make(target, head, **more):
    drafting = {"drafter": "dflash", "draft_model": str(head)}
    return Engine(target=str(target), dtype="float32", **{"kv_memory": 0.01, **drafting, **more})


def params(**more):
    return SamplingParams(max_tokens=24, ignore_eos=True, **more)


def test_the_notes_say_that_it_was_one_pass(tmp_path, deep):
    engine, records = make(deep, write_dflash(tmp_path), tree="3"), []
    engine.subscribe(records.append, lossless=True)
    results = engine.generate(PROMPTS[:2], params())
    engine.close()
    assert engine.run_info.drafter == "dflash"
    assert engine.run_info.aux_layers == ("2", "4", "5")
    for record in records:
        assert [p.name for p in record.passes] == ["pass 1"] * any(len(part.tree) for part in record.requests)
    for result in results:
        steps = [step for step in result.steps if len(step.tree)]
        assert all(step.method.one_pass and len(step.method.confidence) == len(step.tree) for step in steps)
        fed = np.concatenate([step.notes.fed_position for step in steps])  # each committed position once
        assert fed.tolist() == list(range(len(fed)))
        assert all(step.notes.rows.tolist() == [len(step.notes.fed_token) + 4] for step in steps)


def test_the_default_tree_is_the_blocks_chain_and_no_tree_is_deeper(tmp_path, deep):
    head = write_dflash(tmp_path)
    assert str(make(deep, head).config.plan) == "4"
    assert str(make(deep, VARIANTS["from the anchor"](tmp_path / "anchor")).config.plan) == "5"
    with pytest.raises(UserError, match=r"the tree 5 is 5 deep, but a block of .* drafts 4 tokens: use --tree 4"):
        make(deep, head, tree="5")


LOW = (0, 1, 2)  # of four layers
FIVE = ("llama", "qwen3", "gemma3_mixed", "mistral_sliding", "granite")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", FIVE)
def test_drafts_are_those_of_transformers_own_generator(tmp_path, name):
    """Its generator is given what the target made of the accepted tokens, step by step, and keeps its own cache."""
    target = write_tiny_model(tmp_path / "target")
    model, tensors = build(name, vocab=300), dflash_tensors(width=64, target=64)
    model.save_pretrained(target)
    head = write_dflash(tmp_path / "head", tensors, leaving=LOW, hidden_size=64, num_target_layers=4)
    engine = make(target, head)
    (result,), prompt = engine.generate([PROMPTS[3]], params()), engine.encode(PROMPTS[3]).tokens
    with torch.inference_mode():
        wanted = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert result.token_ids == wanted[0, len(prompt) :].tolist()
    generator = DFlashTokenCandidateGenerator(
        assistant(tensors, target_layer_ids=[*LOW]),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        GenerationConfig(max_length=500),
    )
    tokens, known, drafted = prompt + result.token_ids, 0, 0
    for step in (step for step in result.steps if len(step.tree)):
        context = step.context_len + step.prefill_tokens
        with torch.inference_mode():
            states = model(torch.tensor([tokens[:context]]), output_hidden_states=True).hidden_states
            ids = torch.tensor([tokens[: context + 1]])
            places = {"position_ids": torch.arange(context + 1)[None], "attention_mask": torch.ones_like(ids)}
            fed = CausalLMOutputWithPast(hidden_states=tuple(state[:, known:] for state in states))
            made, logits = generator.get_candidates(ids, places, fed, False, context - known - 1)
        assert step.tree.token.tolist() == made[0, context + 1 :].tolist()
        q = logits[0].float().softmax(-1)
        assert np.allclose(step.notes.prob, q[range(4), step.tree.token.tolist()], atol=1e-5)
        known, drafted = context, drafted + 1
    assert drafted > 5
