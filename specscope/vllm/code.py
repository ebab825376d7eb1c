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


def _of(owner: str, names: str) -> tuple[str, ...]:
    """Paths of functions, module:Class.name, of a class or of a module."""
    return tuple(f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names.split())


_SLOTS = "compute_slot_mapping"
# The functions that make what a forward is fed, the one that computes it first, then those it passes through.
INPUTS: Mapping[tuple[bool, str], Mapping[str, tuple[str, ...]]] = {
    (False, TARGET): {
        "tokens": _of(_V1, "_prepare_inputs _prepare_input_ids _preprocess _bookkeeping_sync _update_states"),
        "positions": _of(_V1, "_prepare_inputs _preprocess"),
        "slots": _of(_V1_TABLE, f"MultiGroupBlockTable.{_SLOTS} BlockTable.{_SLOTS}") + _of(_V1, "_get_slot_mappings"),
        "keys seen": _of(_V1, "_build_attention_metadata _prepare_inputs"),
        "block table": _of(_V1, "_build_attention_metadata") + _of(_V1_TABLE, "BlockTable.commit_block_table"),
        "parameters": _of(_V1_RULE, "expand_batch_to_tokens"),
        "choice": _of(_V1_RULE, "rejection_sample RejectionSampler.forward apply_sampling_constraints")
        + _of(_V1_RULE, "RejectionSampler.apply_logits_processors")
        + _of(_V1_SAMPLER, "greedy_sample sample")
        + _of(_V1, "_sample"),
    },
    (False, DRAFTER): {
        "tokens": _of(_PROPOSER, "set_inputs_first_pass propose"),
        "last token": _of(_PROPOSER, "prepare_next_token_ids_padded prepare_next_token_ids_cpu")
        + _of(_V1, "_bookkeeping_sync")
        + _of(_PROPOSER, "set_inputs_first_pass"),
        "positions": _of(_PROPOSER, "set_inputs_first_pass _set_positions propose"),
        "later positions": _of(_PROPOSER, "_update_positions_dependent_metadata propose"),
        "slots": _of(_PROPOSER, "_get_slot_mapping prepare_inputs_padded propose"),
        "keys seen": _of(_PROPOSER, "propose prepare_inputs_padded"),
        "later keys seen": _of(_PROPOSER, "_update_positions_dependent_metadata propose"),
        "block table": _of(_PROPOSER, "prepare_inputs_padded propose"),
        "features": _of(_V1, "propose_draft_token_ids") + _of(_PROPOSER, "propose"),
        "state": _of(_PROPOSER, "propose set_inputs_first_pass"),
        "draft": _of(_PROPOSER, "_greedy_sample _sample_draft_tokens _sample_from_logits")
        + _of(_BASE, "compute_probs_and_sample_next_token")
        + _of(_PROPOSER, "propose")
        + _of(_V1, "propose_draft_token_ids"),
    },
    (True, TARGET): {
        "tokens": _of(_V2, "prepare_inputs")
        + _of(_V2_BATCH, "prepare_prefill_inputs combine_sampled_and_draft_tokens"),
        "positions": _of(_V2, "prepare_inputs") + _of(_V2_BATCH, "prepare_pos_seq_lens"),
        "slots": _of(_V2_TABLE, "compute_slot_mappings") + _of(_V2, "prepare_attn"),
        "keys seen": _of(_V2, "prepare_inputs") + _of(_V2_BATCH, "prepare_pos_seq_lens"),
        "block table": _of(_V2_TABLE, "gather_block_tables") + _of(_V2, "prepare_attn"),
        "choice": _of(f"{_V2_RULE}_utils", "rejection_sample")
        + _of(_V2_RULE, "RejectionSampler._verify RejectionSampler.__call__")
        + _of(_V2_SAMPLER, "sample apply_sampling_params")
        + _of(_V2, "sample"),
    },
    (True, DRAFTER): {
        "tokens": _of(_V2_AR, "prepare_prefill_inputs") + _of(_AR, "propose") + _of(_V2_AR, "update_draft_inputs"),
        "last token": _of(_V2_AR, "prepare_prefill_inputs") + _of(_AR, "propose"),
        "positions": _of(_V2_AR, "prepare_prefill_inputs") + _of(_AR, "_prefill propose"),
        "later positions": _of(_V2_AR, "prepare_decode_inputs update_draft_inputs")
        + _of(_AR, "_multi_step_decode propose"),
        "slots": _of(_V2_TABLE, "compute_slot_mappings") + _of(_AR, "_prefill propose"),
        "keys seen": _of(_AR, "_prefill propose"),
        "later keys seen": _of(_V2_AR, "prepare_decode_inputs") + _of(_AR, "_multi_step_decode propose"),
        "block table": _of(_V2_TABLE, "gather_block_tables") + _of(_AR, "propose"),
        "features": _of(_V2, "sample_tokens") + _of(_AR, "propose"),
        "state": _of(_V2_AR, "update_draft_inputs") + _of(_AR, "_generate_draft propose"),
        "draft": _of(_V2_SPECULATOR, "sample_draft compute_draft_logits")
        + _of(_AR, "_generate_draft _prefill propose"),
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
        own = not path.is_absolute() or path.is_relative_to(Path(functools.__file__).parent)  # Python's
        if not own and not path.is_relative_to(packages):
            return f"replaced: {path}:{code.co_firstlineno}"
    return ""


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
