"""What this judge knows of the config.json of an EAGLE head: a key that it does not know may change the arithmetic.

A key is known where the judge computes what it says, or where it changes nothing: names, versions, training. One that
is off, or not set, changes nothing whatever it means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Holds = Callable[[Any], bool]


def _any(_: object) -> bool:
    return True


def _is(*values: object) -> Holds:
    return lambda value: value in values


# Read by head.py, or by transformers' rotary embedding; and biases and sizes, which the tensors themselves tell.
COMPUTED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("num_hidden_layers", "rms_norm_eps", "rope_theta", "max_position_embeddings", "bias", "attention_bias"),
    *("mlp_bias", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "mask_token_id", "pard_token"),
    *("ptd_token_id", "eagle_aux_hidden_state_layer_ids", "original_max_position_embeddings"),
)
# What changes nothing here, whatever it says
HARMLESS = (
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range", "attention_dropout"),
    *("tie_word_embeddings", "pretraining_tp", "max_window_layers", "base_model_tp_plan", "base_model_pp_plan"),
    *("_name_or_path", "name_or_path", "target_model_type", "target_num_hidden_layers", "speculators_config"),
    *("speculators_model_type", "speculators_version", "num_lookahead_tokens", "num_speculative_tokens"),
    *("hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "output_attentions", "output_hidden_states"),
    *("return_dict", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder", "problem_type"),
    *("has_no_defaults_at_init", "draft_attn_impl", "k_train", "torchscript", "embed_requires_grad"),
)
NESTED = ("transformer_layer_config", "eagle_config", "rope_scaling", "rope_parameters")
# What is computed for these values alone
VALUES: Mapping[str, Holds] = {
    **dict.fromkeys((*COMPUTED, *HARMLESS), _any),
    "hidden_act": _is("silu", "swish"),
    "use_aux_hidden_state": _is(True),
    "use_input_layernorm_in_first_layer": _is(True),
    "use_last_layernorm": _is(True),
    "logit_scale": _is(1),
    "logits_scaling": _is(1),
    "partial_rotary_factor": _is(1),
    "layer_types": lambda kinds: isinstance(kinds, list) and set(kinds) <= {"full_attention"},
    # a rotary embedding's, which transformers computes
    **dict.fromkeys(("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "attention_factor"), _any),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor"), _any),
    "truncate": _any,
}
DECIDES = (
    "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
)  # also where they are off

# By the names that head.py gives them; those of the second line it has no use for
TENSORS = re.compile(
    r"(fc|norm|lm_head|embed_tokens|(midlayer|layers\.\d+)\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj"
    r"|(hidden_norm|input_layernorm|post_attention_layernorm)))\.(weight|bias)|d2t|mask_hidden"
    r"|t2d|.*rotary_emb\.inv_freq"
)


def unknown_tensor(names: Iterable[str]) -> str:
    """The first of a head's tensors that this judge has no place for; "" where there is none."""
    return next((name for name in sorted(names) if not TENSORS.fullmatch(name)), "")


def unknown(config: Mapping[str, Any]) -> str:
    """What of a head's config this judge does not know: the first key with its value; "" where it knows all."""
    return next(_unknown(config), "")


def _unknown(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name in NESTED and isinstance(value, Mapping):
            yield from _unknown(value)
        elif name in DECIDES and value is not None and not VALUES[name](value):
            yield f"{name} = {value!r}"
        elif value in (None, False, 0, "") or value in ([], {}):
            continue
        elif name not in VALUES:
            yield name if value is True else f"{name} = {str(value)[:40]}"
        elif not VALUES[name](value):
            yield f"{name} = {str(value)[:40]}"
