"""Gemma 4's assistant, tiny and random: `python -m tests.transformers.gemma4 FILE` records four requests of it.

It needs transformers 5.24: 5.23 cannot build an assistant all of whose layers share their KV.
"""

import sys

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

import specscope

TOKENS = 48


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
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=text_config(2), backbone_hidden_size=32)
    ).eval()
    for model in (target, assistant):
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.08)
    assistant.generation_config.num_assistant_tokens = 3
    return target, assistant


def generate(target, assistant, seed):
    """(The tokens, the next random numbers)."""
    ids = torch.randint(3, 60, (1, 10), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        assistant_model=assistant,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
    )
    return out[0].tolist(), torch.rand(3).tolist()


if __name__ == "__main__":
    pair = models()
    with specscope.record(sys.argv[1]):
        for seed in range(4):
            generate(*pair, seed)
