"""Tiny random models and tokenizers."""

from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 60


def tiny_llama(seed, *, layers=2, vocabulary=VOCABULARY, std=0.12, **sizes):
    torch.manual_seed(seed)
    plain = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "vocab_size": vocabulary}
    plain |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    config = LlamaConfig(**plain | sizes, bos_token_id=1, eos_token_id=2)
    return random_weights(LlamaForCausalLM(config).eval(), std)


def random_weights(model, std):
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=std)
    return model


def alike(model, *, noise=0.02, seed=1):
    """A drafter that agrees with the target more often than not."""
    drafter = type(model)(model.config).eval()
    drafter.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return drafter


def prompt(length=12, seed=3, vocabulary=VOCABULARY):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (1, length), generator=made)


class OrderedTokenizer(PreTrainedTokenizerFast):
    """Lists its vocabulary by ids; the library's own order is that of a hash table."""

    def get_vocab(self):
        return dict(sorted(super().get_vocab().items(), key=lambda pair: pair[1]))


@cache
def byte_tokenizer(*, assistant=False):
    """Three special tokens, then one for each byte; an assistant's has another order, and a token that is no byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=assistant)
    tokens = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: place + 3 for place, letter in enumerate(letters)}
    tokens |= {"zz": len(tokens)} if assistant else {}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return OrderedTokenizer(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
