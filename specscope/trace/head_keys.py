"""What is known of the config.json of an EAGLE head: a key that is not known may change the arithmetic.

A key is known where the engine and the judge of `audit`, each for itself, compute what it says, or where it changes
nothing: names, versions, training. One that is off, or not set, changes nothing whatever it means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Holds = Callable[[Any], bool]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # at the top, where vLLM looks: j is what enters layer j
IN_SGLANG = "eagle_config"  # in which SGLang looks for them: there j is what leaves layer j


def _any(_: object) -> bool:
    return True


def _is(*values: object) -> Holds:
    return lambda value: value in values


# Computed, by transformers' rotary embedding where it is the base's; and biases and sizes, which the tensors tell.
COMPUTED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("num_hidden_layers", "rms_norm_eps", "rope_theta", "max_position_embeddings", "bias", "attention_bias"),
    *("mlp_bias", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "mask_token_id", "pard_token"),
    *("ptd_token_id", LAYER_IDS, "original_max_position_embeddings"),
    *("norm_output", "norm_before_fc", "fc_norm", "num_aux_hidden_states", "partial_rotary_factor"),
    *("sliding_window", "use_sliding_window", "has_lm_head"),
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
    *("draft_attn_kernel", "attn_implementation", "_attn_implementation", "parallel_draft_heads_num_layers"),
    # How texts were to be sampled, which older transformers wrote into every config
    *("temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "num_return_sequences"),
    *("max_length", "min_length", "length_penalty", "repetition_penalty", "diversity_penalty", "do_sample"),
)
NESTED = ("transformer_layer_config", IN_SGLANG, "rope_scaling", "rope_parameters")
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")  # at the top, or inside eagle_config
FULL, SLIDING = "full_attention", "sliding_attention"
# Whose frequencies do not follow the length of the text
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What is computed for these values alone
VALUES: Mapping[str, Holds] = {
    **dict.fromkeys((*COMPUTED, *HARMLESS), _any),
    "hidden_act": _is("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"),
    "use_aux_hidden_state": _is(True),
    "use_input_layernorm_in_first_layer": _is(True),
    "use_last_layernorm": _is(True),
    "logit_scale": _is(1),
    "logits_scaling": _is(1),
    "next_layer_regular": _is(True),
    "parallel_draft_step": _is(1),
    "layer_types": lambda kinds: isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds),
    # a rotary embedding's, which transformers computes
    **dict.fromkeys(("rope_type", "type"), _is(*ROPE_TYPES)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "truncate"), _any),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _any),
}
DECIDES = (
    "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
)  # also where they are off

# By the authors' names; those of the last line are of no use
TENSORS = re.compile(
    r"(fc|norm|input_norm|fc_norm\.\d+|lm_head|embed_tokens|(midlayer|layers\.\d+)\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj"
    r"|(hidden_norm|input_layernorm|post_attention_layernorm)))\.(weight|bias)|d2t|mask_hidden"
    r"|t2d|.*rotary_emb\.inv_freq"
)


def unknown_tensor(names: Iterable[str]) -> str:
    """The first of a head's tensors that there is no place for; "" where there is none."""
    return next((name for name in sorted(names) if not TENSORS.fullmatch(name)), "")


def unknown(config: Mapping[str, Any]) -> str:
    """What of a head's config is not known: the first key with its value; "" where all is."""
    return next(_unknown(config), "") or next(_contradictions(flattened(config)), "")


def layer_ids(layers: Sequence[Any]) -> dict[str, Any]:
    """Which layers feed a head, as both vLLM and SGLang read it. `layers`: numbers; others neither can be told."""
    of_vllm: dict[str, Any] = {LAYER_IDS: [*layers]}
    if not all(isinstance(layer, int) for layer in layers):
        return of_vllm
    return {**of_vllm, IN_SGLANG: {LAYER_IDS: [layer - 1 for layer in layers]}}


def unread_layers(config: Mapping[str, Any]) -> str:
    """A sentence where one of these engines would take layers of its own choice for those that feed a head; else ""."""
    nested = config.get(IN_SGLANG)
    in_sglang = isinstance(nested, Mapping) and bool(nested.get(LAYER_IDS))
    if in_sglang == bool(config.get(LAYER_IDS)):
        return ""
    engine, there = ("vLLM", "at the top") if in_sglang else ("SGLang", f"in {IN_SGLANG}")
    return (
        f"{engine} would not read which layers feed this head, and would take its default ones: it looks for "
        f"{LAYER_IDS} {there} of the config"
    )


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """All of a config in one: what speculators nest of the layer, and the flags that NVIDIA keeps in eagle_config."""
    layer, eagle = (part if isinstance(part := config.get(name), Mapping) else {} for name in NESTED[:2])
    return {**config, **layer, **{name: eagle[name] for name in FLAGS if name in eagle}}


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


def _contradictions(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are known by themselves, but that contradict the rest of a flattened config."""
    kinds, layers = config.get("layer_types") or [], config.get("num_hidden_layers", 1)
    window, used = config.get("sliding_window"), config.get("use_sliding_window") is not False
    if window and used and not kinds:
        yield f"sliding_window = {window} without layer_types"
    if kinds and isinstance(layers, int) and len(kinds) < layers:
        yield f"layer_types of {len(kinds)} layers, and num_hidden_layers = {layers}"
    if SLIDING in kinds and not (window and used):
        yield f"layer_types = {SLIDING} without a sliding_window that is used"
    if config.get("norm_before_fc") and config.get("fc_norm"):
        yield "norm_before_fc beside fc_norm"
