"""A tiny model with a real tokenizer: enough for every path through the engine in milliseconds."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}{% if enable_thinking is false %}<|-|>{% endif %}"
)


def write_tiny_model(folder: Path, vocab: int = 300, seed: int = 0, layers: int = 3, **sizes: int) -> Path:
    """Byte-level tokens 3..258, three special ones before them, and padding rows up to `vocab`. `sizes`: its own."""
    bytes_to_char = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(bytes_to_char)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    plain: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**plain | sizes)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder
