"""generate() with each kind of candidate generator, over tiny random models.

`python -m tests.transformers.generators FILE` records four requests of Gemma 4's assistant. It needs transformers 5.24:
5.23 cannot build an assistant all of whose layers share their KV.
"""

import sys
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import pytest
import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.modeling_layers import MtpModel

import specscope
from tests.transformers.models import VOCABULARY, alike, byte_tokenizer, prompt, random_weights, tiny_llama

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40}
GREEDY = {"do_sample": False}


@dataclass(frozen=True)
class Case:
    """`drafter`: assistant, or none of its own."""

    arguments: dict = field(default_factory=dict)
    assistant: bool = True
    models: str = "like"  # or mtp, dflash, universal, universal greedy, gemma4


CASES = {
    "assistant, greedy": Case(GREEDY),
    "assistant, sampled": Case(SAMPLED | {"top_p": 0.95}),
    "assistant, plain": Case({"do_sample": True, "top_k": 0}),
    "lookup, greedy": Case(GREEDY | {"prompt_lookup_num_tokens": 4}, False),
    "lookup, sampled": Case(SAMPLED | {"top_k": 3, "prompt_lookup_num_tokens": 4}, False),
    "early exit, greedy": Case(GREEDY | {"assistant_early_exit": 1}, False),
    "early exit, sampled": Case(SAMPLED | {"assistant_early_exit": 1}, False),
    "MTP, greedy": Case(GREEDY | {"use_mtp": True}, False, "mtp"),
    "MTP, sampled": Case(SAMPLED | {"use_mtp": True}, False, "mtp"),
    "DFlash, greedy": Case(GREEDY | {"speculation_type": "dflash"}, True, "dflash"),
    "DFlash, sampled": Case(SAMPLED | {"speculation_type": "dflash"}, True, "dflash"),
    "other tokenizer, greedy": Case(GREEDY, True, "universal greedy"),  # sampling prunes its assistant's head for good
    "other tokenizer, sampled": Case(SAMPLED, True, "universal"),
}
# Transformers 5.23 cannot build this one; sampled, it is not lossless (test_recording.py)
GEMMA4 = {"Gemma 4, greedy": Case(GREEDY, True, "gemma4"), "Gemma 4, sampled": Case(SAMPLED, True, "gemma4")}
GEMMA4_DRAWN = Case({"do_sample": True, "top_k": 0, "eos_token_id": None}, True, "gemma4")
ALL = CASES | GEMMA4


@cache
def models(kind="like"):
    """(A target, a drafter that drafts some tokens at once; None where the target holds it).

    Raises ValueError where this version of transformers cannot build them.
    """
    if kind == "gemma4":
        return _gemma4()
    if kind == "mtp":
        return tiny_llama(0, num_mtp_layers=2), None
    if kind == "dflash":
        return tiny_llama(0), _dflash()
    if kind.startswith("universal"):
        return tiny_llama(0, vocabulary=259), tiny_llama(4, vocabulary=260)
    target = tiny_llama(0)
    drafter = alike(target)
    drafter.generation_config.assistant_confidence_threshold = 0
    drafter.generation_config.num_assistant_tokens = 4
    return target, drafter


def buildable(case):
    """It, ready to be repeated; else the test is skipped: not every version of transformers can build each."""
    try:
        models(case.models)
    except ValueError as error:
        pytest.skip(f"cannot be built: {error}")
    generate(case, tokens=2)  # transformers prunes the head of a universal assistant once, and draws for it
    return case


SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _dflash():
    torch.manual_seed(3)
    own = {"num_hidden_layers": 1, "mask_token_id": 3, "block_size": 5, "target_layer_ids": [0, 1]}
    return MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**SIZES, **HEADS, **TOKENS, **own)).eval()


def _gemma4():
    torch.manual_seed(0)
    own = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "global_head_dim": 16, "sliding_window": 128}
    own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    own |= {"layer_types": ["sliding_attention", "full_attention"]}
    of_target, shared = (
        Gemma4TextConfig(**SIZES, **HEADS, **TOKENS, **own, num_kv_shared_layers=shared) for shared in (0, 2)
    )
    target = Gemma4ForCausalLM(of_target).eval()
    config = Gemma4AssistantConfig(text_config=shared, backbone_hidden_size=32)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 3
    return random_weights(target, 0.08), random_weights(assistant, 0.08)


def _mtp_layers(main_model, **_):
    """Random MTP layers: there is no checkpoint to load them from."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MtpModel(main_model, main_model.config.num_mtp_layers).eval()


def generate(case, seed=7, tokens=32, **more):
    """(The tokens, the next random numbers)."""
    target, drafter = models(case.models)
    arguments = case.arguments | ({"assistant_model": drafter} if case.assistant else {}) | more
    if case.models.startswith("universal"):
        arguments |= {"tokenizer": byte_tokenizer(), "assistant_tokenizer": byte_tokenizer(assistant=True)}
    torch.manual_seed(seed)
    # a text that repeats itself, for lookups
    ids = torch.cat([prompt(seed=seed)[:, :6]] * 2, dim=1)
    with patch.object(MtpModel, "from_pretrained", _mtp_layers):
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0, **arguments
        )
    return out[0].tolist(), torch.rand(3).tolist()


def steps(history):
    """Every request's step."""
    return [part for record in history.steps for part in record.requests]


if __name__ == "__main__":
    with specscope.record(sys.argv[1]):
        for seed in range(4):
            generate(GEMMA4_DRAWN, seed, 48)
