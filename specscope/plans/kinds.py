"""The kinds of drafters, a row each, and a drafter's head on disk: its kind, its files, what is known of its config.

A key of a config is known where the engine and the judge of `audit`, each for itself, compute what it says, or where it
changes nothing: names, versions, training. One that is off, or not set, changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from specscope.errors import UserError
from specscope.whole_file import read_object


@dataclass(frozen=True)
class Kind:
    name: str  # of --drafter, and in records
    family: Literal["head", "model", "text"]  # a head continues the target's hidden states; text is searched
    called: str = ""  # its model, as people call it
    tree: str = ""  # of --tree, where it is not given; "": as deep a chain as its config tells
    runs: bool = False  # whether our engine and our judges run it; others are known by what they are
    in_target: bool = False  # whether it lies in the target's checkpoint, and no other folder is given
    one_pass: bool = False  # all depths come from one pass, whatever the model's config says
    also: tuple[str, ...] = ()  # names of the method in vLLM, SGLang and speculators, in small letters
    words: tuple[str, ...] = ()  # in the names by which a head's config identifies its model, in small letters
    key: str = ""  # of a head's config that no other kind has


KINDS = (
    Kind("eagle", "head", "head", "dynamic:3,depth=2,top=2", runs=True, also=("eagle3", "peagle", "nextn")),
    Kind("ngram", "text", tree="3x5", runs=True, also=("ngram_gpu",)),
    Kind("suffix", "text", tree="dynamic:16,depth=12", runs=True),
    Kind("draft_model", "model", "draft model", "5", runs=True, also=("standalone",)),
    Kind("dspark", "head", "DSpark", one_pass=True, words=("dspark",)),
    Kind("domino", "head", "Domino", words=("domino",)),
    Kind("dflash2", "head", "DFlash2", one_pass=True, words=("dflash2",)),
    Kind("dflash", "head", "DFlash", runs=True, one_pass=True, words=("dflash",), key="dflash_config"),
    Kind("medusa", "head", "Medusa", words=("medusa",), key="medusa_num_heads"),
    Kind("hydra", "head", "Hydra", words=("hydra",), key="hydra_num_heads"),
    Kind("mtp", "head", "MTP", "1", True, True, also=("frozen_kv_mtp",), words=("mtp", "nextn")),
    Kind("mlp_speculator", "head", "MLP speculator", words=("mlp_speculator", "mlpspeculator")),
)
BY_NAME = {kind.name: kind for kind in KINDS}
RUN_HERE = tuple(kind.name for kind in KINDS if kind.runs)
_ALSO = {name: kind.name for kind in KINDS for name in kind.also}


def drafter_named(method: str) -> str:
    """The name of the kind that another engine's method is; the method itself where it is none of ours."""
    return _ALSO.get(method.lower(), method)


def _part(drafter: str, *families: str) -> str:
    """The part of our drafter that is of these families; "" for none. In older captures two drafted: suffix+eagle."""
    kinds = (kind for name in drafter.split("+") if (kind := BY_NAME.get(name)) is not None and kind.runs)
    return next((kind.name for kind in kinds if kind.family in families), "")


def text_part(drafter: str) -> str:
    return _part(drafter, "text")


def model_part(drafter: str) -> str:
    return _part(drafter, "head", "model")


def runs_head(drafter: str) -> bool:
    return bool(_part(drafter, "head"))


def lies_in_target(drafter: str) -> bool:
    return drafter in BY_NAME and BY_NAME[drafter].in_target


Holds = Callable[[Any], bool]
INDEX = ".index.json"  # of weights in several files, and which tensor lies in which
# In the order in which they are looked for
WEIGHTS = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
# Of MTP layers, and of whole models that have some
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # at the top, where vLLM looks: j is what enters layer j
IN_SGLANG = "eagle_config"  # in which SGLang looks for them: there j is what leaves layer j
NESTED = ("transformer_layer_config", IN_SGLANG, "rope_scaling", "rope_parameters")
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")  # at the top, or inside eagle_config
FULL, SLIDING = "full_attention", "sliding_attention"
# Computed, by transformers' rotary embedding where it is the base's; and biases and sizes, which the tensors tell
COMPUTED = f"""
    hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size num_hidden_layers
    rms_norm_eps rope_theta max_position_embeddings attention_bias draft_vocab_size target_hidden_size
    mask_token_id original_max_position_embeddings num_aux_hidden_states
    sliding_window use_sliding_window has_lm_head factor low_freq_factor high_freq_factor attention_factor truncate
    beta_fast beta_slow mscale mscale_all_dim {LAYER_IDS}
"""
# What changes nothing here, whatever it says; the last two lines are how texts were to be sampled, which older
# transformers wrote into every config
HARMLESS = """
    architectures model_type torch_dtype dtype transformers_version auto_map use_cache bos_token_id eos_token_id
    pad_token_id unk_token_id initializer_range attention_dropout tie_word_embeddings pretraining_tp max_window_layers
    base_model_tp_plan base_model_pp_plan _name_or_path name_or_path target_model_type target_num_hidden_layers
    speculators_config speculators_model_type speculators_version num_lookahead_tokens num_speculative_tokens
    hidden_dropout resid_pdrop embd_pdrop attn_pdrop output_attentions output_hidden_states return_dict
    chunk_size_feed_forward id2label label2id is_encoder_decoder problem_type has_no_defaults_at_init draft_attn_impl
    k_train torchscript embed_requires_grad draft_attn_kernel attn_implementation _attn_implementation
    parallel_draft_heads_num_layers
    temperature top_k top_p typical_p num_beams num_beam_groups num_return_sequences max_length min_length
    length_penalty repetition_penalty diversity_penalty do_sample
"""


def _is(*values: object) -> Holds:
    return lambda value: value in values


IN_EAGLE = ("use_input_layernorm_in_first_layer", "use_last_layernorm")
DECIDES = ("use_aux_hidden_state", "is_neox_style", *IN_EAGLE)  # must be on, or not be said
OF_LAYERS: Mapping[str, Holds] = {  # what is computed for these values alone, in heads of all kinds
    **dict.fromkeys((*COMPUTED.split(), *HARMLESS.split()), lambda _: True),
    **dict.fromkeys(DECIDES[:2], _is(True)),
    **dict.fromkeys(("logit_scale", "logits_scaling"), _is(1)),
    # a rotary embedding whose frequencies do not follow the length of the text
    **dict.fromkeys(("rope_type", "type"), _is("default", "linear", "llama3", "yarn")),
    "hidden_act": _is("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"),
    "layer_types": lambda kinds: isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds),
}
VALUES: Mapping[str, Holds] = {  # and in an EAGLE head
    **OF_LAYERS,
    **dict.fromkeys(("bias", "mlp_bias", "pard_token", "ptd_token_id", *FLAGS), lambda _: True),
    **dict.fromkeys((*IN_EAGLE, "next_layer_regular"), _is(True)),
    "parallel_draft_step": _is(1),
    "transformer_layer_architecture": _is("auto", "LlamaDecoderLayer"),  # speculators'
}
# By the authors' names; those of the last line are of no use
TENSORS = re.compile(
    r"(fc|norm|input_norm|fc_norm\.\d+|lm_head|embed_tokens|(midlayer|layers\.\d+)\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj"
    r"|(hidden_norm|input_layernorm|post_attention_layernorm)))\.(weight|bias)|d2t|mask_hidden"
    r"|t2d|.*rotary_emb\.inv_freq"
)


def is_head(folder: Path) -> bool:
    config = _config(folder)
    known = "draft_vocab_size" in config or _kind(folder, config) is not None
    return known or "fc.weight" in _tensors(folder)  # the config of an older EAGLE head is a plain model's


def head_kind(folder: Path) -> str:
    """The drafter that runs the head in a folder: eagle, unless its config names another kind that runs here."""
    kind = _kind(folder, _config(folder))
    return kind.name if kind is not None and kind.runs and not kind.in_target else "eagle"


def _config(folder: Path) -> Mapping[str, Any]:
    with suppress(UserError):  # the loader says what is wrong
        return read_object(folder / "config.json")
    return {}


def modules_in(config: Mapping[str, Any]) -> int:
    """How many next-token modules (MTP) a model's config names; 0 where it names none."""
    return next((count for key in MTP_KEYS if isinstance(count := config.get(key), int) and count > 0), 0)


def check_head(folder: Path, unknown: Callable[[Mapping[str, Any]], str]) -> None:
    """Raises UserError for a head that does not run here: by its kind, or by an `unknown` key of its config."""
    config = read_object(folder / "config.json")
    check_kind(folder, config, "what runs here are EAGLE, EAGLE-3, P-EAGLE and DFlash heads")
    if key := unknown(config):
        why = "it may change what the head computes and is not implemented"
        raise UserError(f"{folder}/config.json has `{key}`: {why}")


def check_kind(folder: Path, config: Mapping[str, Any], instead: str, *, runs: bool = True) -> None:
    """Raises UserError for a head of a kind that does not run here, or of any kind where none `runs`."""
    kind = _kind(folder, config)
    if kind is not None and kind.in_target:
        instead += f"; --drafter {kind.name} runs the modules in the target's checkpoint"
    if kind is not None and not (kind.runs and runs and not kind.in_target):
        raise UserError(f"{folder} holds a drafter of the kind {kind.called}: {instead}")


def _kind(folder: Path, config: Mapping[str, Any]) -> Kind | None:
    """The kind of a head; None where nothing says so, as in an EAGLE head's config, and for any other folder."""
    architectures, speculators = config.get("architectures"), config.get("speculators_config")
    named = [*architectures] if isinstance(architectures, list) else []
    named += [config.get("model_type"), config.get("speculators_model_type")]
    named += [speculators.get("algorithm")] if isinstance(speculators, Mapping) else []
    names = [str(name).lower() for name in named]
    by_name = (kind for kind in KINDS if any(word in name for word in kind.words for name in names))
    by_key = (kind for kind in KINDS if kind.key and config.get(kind.key))
    if (known := next(by_name, None) or next(by_key, None)) is not None:
        return known
    algorithm = config.get("speculators_model_type")
    if isinstance(algorithm, str):
        return BY_NAME.get(drafter_named(algorithm)) or Kind(algorithm, "head", algorithm)
    tensors = _tensors(folder) if any(config.get(key) for key in MTP_KEYS) else []
    return BY_NAME["mtp"] if tensors and all("mtp." in name for name in tensors) else None


def weight_files(folder: Path) -> list[Path]:
    """Raises UserError where there are none, and for an index of files that are not in the folder."""
    found = next((file for name in WEIGHTS if (file := folder / name).is_file()), None)
    if found is None:
        raise UserError(f"{folder} has neither {WEIGHTS[0]} nor {WEIGHTS[2]}, nor an index of several")
    if not found.name.endswith(INDEX):
        return [found]
    named = read_object(found).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise UserError(f"{found} does not say in `weight_map` which tensor lies in which file")
    files = sorted(set(named.values()))
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise UserError(f"{found} names {file!r}, which is not in its folder")
    return [folder / file for file in files]


def _opened(folder: Path) -> Iterator[Any]:
    """A head's safetensors, one after the other, as far as they can be read: the loader says what is wrong."""
    from safetensors import SafetensorError, safe_open

    with suppress(UserError, OSError, SafetensorError):
        for file in weight_files(folder):
            with safe_open(file, framework="numpy") as tensors:
                yield tensors


def _tensors(folder: Path) -> list[str]:
    return [name for file in _opened(folder) for name in file.keys()]  # noqa: SIM118 - it is no mapping


def draft_tokens_of(folder: Path) -> list[int] | None:
    """The target's token behind each draft token of a head; None where nothing tells them, or they cannot be read."""
    for tensors in _opened(folder):
        if "d2t" in tensors.keys():  # noqa: SIM118 - it is no mapping
            return [place + int(offset) for place, offset in enumerate(tensors.get_tensor("d2t"))]
    return None


def unknown_tensor(names: Iterable[str], known: re.Pattern[str] = TENSORS) -> str:
    return next((name for name in sorted(names) if not known.fullmatch(name)), "")


def unknown(config: Mapping[str, Any]) -> str:
    """The first key of a head's config that is not known, with its value; "" where all are."""
    return next(chain(unknown_keys(config, VALUES, NESTED), _contradictions(flattened(config))), "")


def unknown_keys(config: Mapping[str, Any], known: Mapping[str, Holds], nested: Collection[str]) -> Iterator[str]:
    """Also of the `nested` parts; a known key with another value is unknown."""
    for name, value in config.items():
        if name in nested and isinstance(value, Mapping):
            yield from unknown_keys(value, known, nested)
        elif name in DECIDES and value is not None and not VALUES[name](value):
            yield f"{name} = {value!r}"
        elif value in (None, False, 0, "") or value in ([], {}):
            continue
        elif name not in known:
            yield name if value is True else f"{name} = {str(value)[:40]}"
        elif not known[name](value):
            yield f"{name} = {str(value)[:40]}"


def _contradictions(config: Mapping[str, Any]) -> Iterator[str]:
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
    nested = part.get(LAYER_IDS) if isinstance(part := config.get(IN_SGLANG), Mapping) else None
    if (ids := config.get(LAYER_IDS)) and nested and layer_ids(ids).get(IN_SGLANG) != {LAYER_IDS: nested}:
        yield f"{LAYER_IDS} = {ids} beside {nested} in {IN_SGLANG}, which counts from one less"


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """All of a config in one: what speculators nest of the layer, and the flags that NVIDIA keeps in eagle_config."""
    layer, eagle = (part if isinstance(part := config.get(name), Mapping) else {} for name in NESTED[:2])
    return {**config, **layer, **{name: eagle[name] for name in FLAGS if name in eagle}}


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
        f"{engine} would not find which layers feed this head and would use its defaults: it looks for "
        f"{LAYER_IDS} {there} of the config"
    )
