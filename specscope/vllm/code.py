"""Which functions of vLLM compute an operation: by class and method, and by file and line where one was replaced."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

TARGET, DRAFTER = "target", "drafter"
MADE_BY = ("_compute_inv_freq", "_compute_cos_sin_cache")  # what a module's tables are made by
_GPU, _SPEC, _SAMPLE = "vllm.v1.worker.gpu", "vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.sample"
OWNERS = {  # modules, or classes of them, by a short name
    "v1": "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    "v1tables": "vllm.v1.worker.block_table:MultiGroupBlockTable",
    "v1table": "vllm.v1.worker.block_table:BlockTable",
    "v1rule": f"{_SAMPLE}.rejection_sampler",
    "v1verifier": f"{_SAMPLE}.rejection_sampler:RejectionSampler",
    "v1sampler": f"{_SAMPLE}.sampler:Sampler",
    "proposer": f"{_SPEC}:SpecDecodeBaseProposer",
    "drawing": _SPEC,
    "v2": f"{_GPU}.model_runner:GPUModelRunner",
    "v2batch": f"{_GPU}.input_batch",
    "v2table": f"{_GPU}.block_table:BlockTables",
    "v2rule": f"{_GPU}.spec_decode.rejection_sampler_utils",
    "v2verifier": f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler",
    "v2sampler": f"{_GPU}.sample.sampler:Sampler",
    "feeding": f"{_GPU}.spec_decode.target_dependent_ar.speculator",
    "speculator": f"{_GPU}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
    "v2draft": f"{_GPU}.spec_decode.speculator:DraftModelSpeculator",
}
# The functions that make what a forward is fed, the one that computes it first, then those it passes through.
INPUTS: Mapping[tuple[bool, str], Mapping[str, str]] = {
    (False, TARGET): {
        "tokens": "v1 _prepare_inputs _prepare_input_ids _preprocess _bookkeeping_sync _update_states",
        "positions": "v1 _prepare_inputs _preprocess",
        "slots": "v1tables compute_slot_mapping; v1table compute_slot_mapping; v1 _get_slot_mappings",
        "keys seen": "v1 _build_attention_metadata _prepare_inputs",
        "block table": "v1 _build_attention_metadata; v1table commit_block_table",
        "parameters": "v1rule expand_batch_to_tokens",
        "choice": "v1rule rejection_sample; v1verifier forward; v1rule apply_sampling_constraints; "
        "v1verifier apply_logits_processors; v1sampler greedy_sample sample; v1 _sample",
    },
    (False, DRAFTER): {
        "tokens": "proposer set_inputs_first_pass propose",
        "last token": "proposer prepare_next_token_ids_padded prepare_next_token_ids_cpu; v1 _bookkeeping_sync; "
        "proposer set_inputs_first_pass",
        "positions": "proposer set_inputs_first_pass _set_positions propose",
        "later positions": "proposer _update_positions_dependent_metadata propose",
        "slots": "proposer _get_slot_mapping prepare_inputs_padded propose",
        "keys seen": "proposer propose prepare_inputs_padded",
        "later keys seen": "proposer _update_positions_dependent_metadata propose",
        "block table": "proposer prepare_inputs_padded propose",
        "features": "v1 propose_draft_token_ids; proposer propose",
        "state": "proposer propose set_inputs_first_pass",
        "draft": "proposer _greedy_sample _sample_draft_tokens _sample_from_logits; "
        "drawing compute_probs_and_sample_next_token; proposer propose; v1 propose_draft_token_ids",
    },
    (True, TARGET): {
        "tokens": "v2 prepare_inputs; v2batch prepare_prefill_inputs combine_sampled_and_draft_tokens",
        "positions": "v2 prepare_inputs; v2batch prepare_pos_seq_lens",
        "slots": "v2table compute_slot_mappings; v2 prepare_attn",
        "keys seen": "v2 prepare_inputs; v2batch prepare_pos_seq_lens",
        "block table": "v2table gather_block_tables; v2 prepare_attn",
        "choice": "v2rule rejection_sample; v2verifier _verify __call__; v2sampler sample apply_sampling_params; "
        "v2 sample",
    },
    (True, DRAFTER): {
        "tokens": "feeding prepare_prefill_inputs; speculator propose; feeding update_draft_inputs",
        "last token": "feeding prepare_prefill_inputs; speculator propose",
        "positions": "feeding prepare_prefill_inputs; speculator _prefill propose",
        "later positions": "feeding prepare_decode_inputs update_draft_inputs; speculator _multi_step_decode propose",
        "slots": "v2table compute_slot_mappings; speculator _prefill propose",
        "keys seen": "speculator _prefill propose",
        "later keys seen": "feeding prepare_decode_inputs; speculator _multi_step_decode propose",
        "block table": "v2table gather_block_tables; speculator propose",
        "features": "v2 sample_tokens; speculator propose",
        "state": "feeding update_draft_inputs; speculator _generate_draft propose",
        "draft": "v2draft sample_draft compute_draft_logits; speculator _generate_draft _prefill propose",
    },
}


def inputs_code(who: str, runner: Any, proposer: Any) -> dict[str, list[str]]:
    """The functions that make a model's inputs, by name: a runner's own, where it is of a subclass."""
    table = INPUTS[hasattr(runner, "prepare_inputs"), who]
    return {name: list(_functions(text, runner, proposer)) for name, text in table.items()}


def _functions(text: str, *things: Any) -> Iterator[str]:
    """The texts of functions, by where they are looked up: a thing's own class may have another. But for those that
    this vLLM has not.
    """
    for group in text.split("; "):
        short, *names = group.split()
        try:
            owner: Any = pkgutil.resolve_name(OWNERS[short])
        except (ImportError, AttributeError):
            continue
        if isinstance(owner, type):
            owner = next((type(thing) for thing in things if isinstance(thing, owner)), owner)
        yield from (_method(owner, name) for name in names if hasattr(owner, name))


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
    """A function of an object, a class or a module: by where it is defined, and behind it where the code that runs
    came from, if that is not vLLM's own file.
    """
    kind = thing if isinstance(thing, type | ModuleType) else type(thing)
    lies_in = next((parent for parent in getattr(kind, "__mro__", ()) if name in vars(parent)), kind)
    where = kind.__name__ if isinstance(kind, ModuleType) else f"{lies_in.__module__}.{lies_in.__qualname__}"
    place = replaced(getattr(thing, name, None))
    return f"{where}.{name}" + (f" ({place})" if place else "")


def replaced(function: Any) -> str:
    """The file and line of a function that somebody put in the place of vLLM's; "" for vLLM's own.

    A decorator of vLLM's or torch's is no replacement.
    """
    home = sys.modules.get("vllm")
    packages = Path(str(getattr(home, "__file__", ""))).parent.parent
    while function is not None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is not None and not getattr(function, "__specscope__", False):
            path = Path(code.co_filename)
            own = not path.is_absolute() or path.is_relative_to(Path(functools.__file__).parent)  # Python's
            if not own and not path.is_relative_to(packages):
                return f"replaced: {path}:{code.co_firstlineno}"
        function = getattr(function, "__wrapped__", None)
    return ""
