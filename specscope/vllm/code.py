"""Which functions of vLLM compute an operation: by class and method, and by file and line where one was replaced."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specscope.trace.inside.hooking import log

TARGET, DRAFTER = "target", "drafter"
MADE_BY = ("_compute_inv_freq", "_compute_cos_sin_cache")  # what a module's tables are made by
_V1, _BASE = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.spec_decode.llm_base_proposer"
_V1_RULE, _V1_SAMPLER = "vllm.v1.sample.rejection_sampler", "vllm.v1.sample.sampler:Sampler"
_V1_TABLE = "vllm.v1.worker.block_table"
_PROPOSER = f"{_BASE}:SpecDecodeBaseProposer"
_V2, _V2_TABLE = "vllm.v1.worker.gpu.model_runner:GPUModelRunner", "vllm.v1.worker.gpu.block_table:BlockTables"
_V2_AR = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
_AR = f"{_V2_AR}:TargetDependentARSpeculator"
_V2_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
_V2_RULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_V2_SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
_V2_BATCH = "vllm.v1.worker.gpu.input_batch"
# The functions that make what a forward is fed, the one that computes it first, then those it passes through.
INPUTS: Mapping[tuple[bool, str], Mapping[str, tuple[str, ...]]] = {
    (False, TARGET): {
        "tokens": (
            f"{_V1}._prepare_inputs",
            f"{_V1}._prepare_input_ids",
            f"{_V1}._preprocess",
            f"{_V1}._bookkeeping_sync",
            f"{_V1}._update_states",
        ),
        "positions": (f"{_V1}._prepare_inputs", f"{_V1}._preprocess"),
        "slots": (
            f"{_V1_TABLE}:MultiGroupBlockTable.compute_slot_mapping",
            f"{_V1_TABLE}:BlockTable.compute_slot_mapping",
            f"{_V1}._get_slot_mappings",
        ),
        "keys seen": (f"{_V1}._build_attention_metadata", f"{_V1}._prepare_inputs"),
        "block table": (f"{_V1}._build_attention_metadata", f"{_V1_TABLE}:BlockTable.commit_block_table"),
        "parameters": (f"{_V1_RULE}:expand_batch_to_tokens",),
        "choice": (
            f"{_V1_RULE}:rejection_sample",
            f"{_V1_RULE}:RejectionSampler.forward",
            f"{_V1_RULE}:apply_sampling_constraints",
            f"{_V1_RULE}:RejectionSampler.apply_logits_processors",
            f"{_V1_SAMPLER}.greedy_sample",
            f"{_V1_SAMPLER}.sample",
            f"{_V1}._sample",
        ),
    },
    (False, DRAFTER): {
        "tokens": (f"{_PROPOSER}.set_inputs_first_pass", f"{_PROPOSER}.propose"),
        "last token": (
            f"{_PROPOSER}.prepare_next_token_ids_padded",
            f"{_PROPOSER}.prepare_next_token_ids_cpu",
            f"{_V1}._bookkeeping_sync",
            f"{_PROPOSER}.set_inputs_first_pass",
        ),
        "positions": (f"{_PROPOSER}.set_inputs_first_pass", f"{_PROPOSER}._set_positions", f"{_PROPOSER}.propose"),
        "later positions": (f"{_PROPOSER}._update_positions_dependent_metadata", f"{_PROPOSER}.propose"),
        "slots": (f"{_PROPOSER}._get_slot_mapping", f"{_PROPOSER}.prepare_inputs_padded", f"{_PROPOSER}.propose"),
        "keys seen": (f"{_PROPOSER}.propose", f"{_PROPOSER}.prepare_inputs_padded"),
        "later keys seen": (f"{_PROPOSER}._update_positions_dependent_metadata", f"{_PROPOSER}.propose"),
        "block table": (f"{_PROPOSER}.prepare_inputs_padded", f"{_PROPOSER}.propose"),
        "features": (f"{_V1}.propose_draft_token_ids", f"{_PROPOSER}.propose"),
        "state": (f"{_PROPOSER}.propose", f"{_PROPOSER}.set_inputs_first_pass"),
        "draft": (
            f"{_PROPOSER}._greedy_sample",
            f"{_PROPOSER}._sample_draft_tokens",
            f"{_PROPOSER}._sample_from_logits",
            f"{_BASE}:compute_probs_and_sample_next_token",
            f"{_PROPOSER}.propose",
            f"{_V1}.propose_draft_token_ids",
        ),
    },
    (True, TARGET): {
        "tokens": (
            f"{_V2}.prepare_inputs",
            f"{_V2_BATCH}:prepare_prefill_inputs",
            f"{_V2_BATCH}:combine_sampled_and_draft_tokens",
        ),
        "positions": (f"{_V2}.prepare_inputs", f"{_V2_BATCH}:prepare_pos_seq_lens"),
        "slots": (f"{_V2_TABLE}.compute_slot_mappings", f"{_V2}.prepare_attn"),
        "keys seen": (f"{_V2}.prepare_inputs", f"{_V2_BATCH}:prepare_pos_seq_lens"),
        "block table": (f"{_V2_TABLE}.gather_block_tables", f"{_V2}.prepare_attn"),
        "choice": (
            f"{_V2_RULE}_utils:rejection_sample",
            f"{_V2_RULE}:RejectionSampler._verify",
            f"{_V2_RULE}:RejectionSampler.__call__",
            f"{_V2_SAMPLER}.sample",
            f"{_V2_SAMPLER}.apply_sampling_params",
            f"{_V2}.sample",
        ),
    },
    (True, DRAFTER): {
        "tokens": (f"{_V2_AR}:prepare_prefill_inputs", f"{_AR}.propose", f"{_V2_AR}:update_draft_inputs"),
        "last token": (f"{_V2_AR}:prepare_prefill_inputs", f"{_AR}.propose"),
        "positions": (f"{_V2_AR}:prepare_prefill_inputs", f"{_AR}._prefill", f"{_AR}.propose"),
        "later positions": (
            f"{_V2_AR}:prepare_decode_inputs",
            f"{_V2_AR}:update_draft_inputs",
            f"{_AR}._multi_step_decode",
            f"{_AR}.propose",
        ),
        "slots": (f"{_V2_TABLE}.compute_slot_mappings", f"{_AR}._prefill", f"{_AR}.propose"),
        "keys seen": (f"{_AR}._prefill", f"{_AR}.propose"),
        "later keys seen": (f"{_V2_AR}:prepare_decode_inputs", f"{_AR}._multi_step_decode", f"{_AR}.propose"),
        "block table": (f"{_V2_TABLE}.gather_block_tables", f"{_AR}.propose"),
        "features": (f"{_V2}.sample_tokens", f"{_AR}.propose"),
        "state": (f"{_V2_AR}:update_draft_inputs", f"{_AR}._generate_draft", f"{_AR}.propose"),
        "draft": (
            f"{_V2_SPECULATOR}.sample_draft",
            f"{_V2_SPECULATOR}.compute_draft_logits",
            f"{_AR}._generate_draft",
            f"{_AR}._prefill",
            f"{_AR}.propose",
        ),
    },
}


def inputs_code(who: str, runner: Any, proposer: Any) -> dict[str, list[str]]:
    """The functions that make a model's inputs, by name: a runner's own, where it is of a subclass."""
    table = INPUTS[hasattr(runner, "prepare_inputs"), who]
    return {name: [text for path in paths if (text := _path(path, runner, proposer))] for name, paths in table.items()}


def _path(path: str, *owners: Any) -> str:
    """The text of a function, by where it is looked up; "" where this vLLM has none."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return ""
    owner, _, method = name.rpartition(".")
    for part in filter(None, owner.split(".")):
        found = getattr(found, part, None)
    for thing in owners:  # a runner's or a proposer's own class may have another
        if owner and isinstance(found, type) and isinstance(thing, found):
            found = type(thing)
    function = getattr(found, method, None)
    if function is None:
        return ""
    lies_in = next((kind for kind in getattr(found, "__mro__", ()) if method in vars(kind)), None)
    where = f"{lies_in.__module__}.{lies_in.__qualname__}" if lies_in is not None else module
    return _text(f"{where}.{method}", function)


def functions_of(module: Any) -> list[str]:
    """The functions that run when this module is called, the outer one first."""
    listed = [_method(module, "forward")]
    chosen = getattr(module, "_forward_method", None)  # of a CustomOp: the one of this platform
    if chosen is not None:
        name = getattr(chosen, "__name__", "forward_native")
        plain = ".CustomOp." in _method(module, name)  # which only calls the native one
        listed = [_method(module, "forward_native" if plain else name)]
    for name, method in (("quant_method", "apply"), ("impl", "forward")):
        if (inner := getattr(module, name, None)) is not None and hasattr(inner, method):
            listed.append(_method(inner, method))
    listed += [_method(module, name) for name in MADE_BY if hasattr(module, name)]
    return listed


def _method(thing: Any, name: str) -> str:
    kind = type(thing)
    lies_in = next((parent for parent in kind.__mro__ if name in vars(parent)), kind)
    own = vars(thing).get(name) if hasattr(thing, "__dict__") else None
    return _text(f"{lies_in.__module__}.{lies_in.__qualname__}.{name}", own or getattr(kind, name, None))


def _text(name: str, function: Any) -> str:
    """A function's name, and behind it where the code that ran came from, if that is not vLLM's own file."""
    place = replaced(function)
    return f"{name} ({place})" if place else name


def replaced(function: Any) -> str:
    """The file and line of a function that somebody put in the place of vLLM's; "" for vLLM's own.

    A decorator of vLLM's or torch's is no replacement.
    """
    home = sys.modules.get("vllm")
    packages = Path(str(getattr(home, "__file__", ""))).parent.parent
    for step in _wrapped(function):
        code = getattr(step, "__code__", None)
        if code is None or getattr(step, "__specscope__", False):
            continue
        path = Path(code.co_filename)
        if not path.is_relative_to(packages) and not _of_python(path):
            return f"replaced: {path}:{code.co_firstlineno}"
    return ""


def _of_python(path: Path) -> bool:
    return not path.is_absolute() or path.is_relative_to(Path(functools.__file__).parent)


def _wrapped(function: Any) -> list[Any]:
    """A function, and what it was made of, the outer one first."""
    chain: list[Any] = []
    while function is not None and len(chain) < 20:
        function = getattr(function, "__func__", function)
        chain.append(function)
        function = getattr(function, "__wrapped__", None)
    if len(chain) == 20:
        log.warning("specscope: a function is wrapped in itself")
    return chain
