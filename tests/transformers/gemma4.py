"""Gemma 4's assistant, tiny and random: `python -m tests.transformers.gemma4 FILE` records four requests of it.

It needs transformers 5.24: 5.23 cannot build an assistant all of whose layers share their KV.
"""

import sys

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

import specscope


def text_config(shared):
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "global_head_dim": 16, "sliding_window": 128}
    inputs = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "max_position_embeddings": 512}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": shared}
    return Gemma4TextConfig(**sizes, **heads, **inputs, **tokens, **layers)


def models():
    """(A target, its assistant). Raises ValueError where this version of transformers cannot build one."""
    torch.manual_seed(0)
    target = Gemma4ForCausalLM(text_config(0)).eval()
    config = Gemma4AssistantConfig(text_config=text_config(2), backbone_hidden_size=32)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    for model in (target, assistant):
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.08)
    assistant.generation_config.num_assistant_tokens = 3
    return target, assistant


if __name__ == "__main__":
    from tests.transformers.generators import GEMMA4_DRAWN, generate

    with specscope.record(sys.argv[1]):
        for seed in range(4):
            generate(GEMMA4_DRAWN, seed, 48)
