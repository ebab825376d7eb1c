"""What the hooks rely on in vLLM: the functions that they wrap, and their parameters, in the versions that are known.

In another version, or where a signature differs, nothing is wrapped: the plugin says so, and gives aggregates instead.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

from specscope.trace.inside.hooking import Signatures, compared, live, written

SCHEDULER = "vllm.v1.core.sched.scheduler"
PLAIN = "vllm.v1.sample.sampler"
REJECTION = "vllm.v1.sample.rejection_sampler"
RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_PLAIN = "vllm.v1.worker.gpu.sample.sampler"
V2_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"


_32: Mapping[str, dict[str, str]] = {
    SCHEDULER: {
        "Scheduler.add_request": "self request",
        "Scheduler._preempt_request": "self request timestamp drop_stale_output",
        "Scheduler._free_request": "self request delay_free_blocks",
        "Scheduler.schedule": "self throttle_prefills",
        "Scheduler.update_from_output": "self scheduler_output model_runner_output",
    },
    PLAIN: {
        "Sampler.sample": "self logits sampling_metadata logprobs_mode_override",
    },
    REJECTION: {
        "RejectionSampler.forward": "self metadata draft_probs logits sampling_metadata",
        "rejection_sample": (
            "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
            "bonus_token_ids sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel"
        ),
        "generate_uniform_probs": "num_tokens num_draft_tokens generators device",
        "sample_recovered_tokens": (
            "max_spec_len num_draft_tokens cu_num_draft_tokens draft_token_ids draft_probs target_probs "
            "sampling_metadata device use_fp64_gumbel"
        ),
    },
    RUNNER: {
        "GPUModelRunner.execute_model": "self scheduler_output intermediate_tensors",
        "GPUModelRunner._sample": "self logits spec_decode_metadata",
        "GPUModelRunner.sample_tokens": "self grammar_output",
        "GPUModelRunner.propose_draft_token_ids": (
            "self scheduler_output sampled_token_ids sampling_metadata hidden_states sample_hidden_states "
            "aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings"
        ),
    },
    V2_PLAIN: {
        "Sampler.__call__": "self logits input_batch",
        "Sampler.sample": (
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
            "seq_lens_upper_bound_np return_logprobs"
        ),
        "Sampler._sample_random": (
            "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p use_fused_sampler"
        ),
    },
    V2_REJECTION: {
        "RejectionSampler.__call__": "self logits input_batch draft_logits invalid_drafts",
        "RejectionSampler._verify": (
            "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np "
            "expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled"
        ),
    },
    V2_RUNNER: {
        "GPUModelRunner.execute_model": (
            "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile "
            "context_len valid_dummy_state_slots randomize_inputs"
        ),
        "GPUModelRunner.sample_tokens": "self grammar_output",
    },
}
# What differs since.
_33: Mapping[str, dict[str, str]] = {
    REJECTION: {
        "rejection_sample": (
            "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
            "bonus_token_ids sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel "
            "fly_window_size fly_entropy_threshold fly_entropy_top_k"
        ),
    },
    V2_PLAIN: {
        "Sampler._sample_random": (
            "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p has_topp_only_rows "
            "use_fused_sampler"
        ),
    },
}


def _read(*tables: Mapping[str, dict[str, str]]) -> Mapping[str, Signatures]:
    """Later tables replace what earlier ones say of a function."""
    merged: dict[str, dict[str, tuple[str, ...]]] = {}
    for table in tables:
        for module, functions in table.items():
            merged.setdefault(module, {}).update(
                {name: tuple(parameters.split()) for name, parameters in functions.items()}
            )
    return merged


KNOWN: Mapping[str, Mapping[str, Signatures]] = {"0.32.0": _read(_32), "0.33.0": _read(_32, _33)}


def signatures(version: str) -> Mapping[str, Signatures]:
    """Known signatures by module. Raises KeyError for a version that is not known."""
    return KNOWN[version.split("+")[0]]


def is_known(version: str) -> bool:
    """Whether the hooks were written for it. `0.32.0+cpu` is 0.32.0."""
    return version.split("+")[0] in KNOWN


def differences(module: ModuleType, version: str) -> list[str]:
    """What the hooks would wrap in the module, and is not as they know it; one line each.

    A function that somebody else put there is passed over: what counts is how vLLM calls it, which has not changed.
    """
    wanted = signatures(version)[module.__name__]
    return list(compared(module.__name__, wanted, lambda name: live(module, name, wanted[name])))


def differences_in_text(root: Path, version: str) -> list[str]:
    """Likewise for all modules, from vLLM's sources under `root` (its folder `vllm`): nothing is imported."""
    lines: list[str] = []
    for name, wanted in signatures(version).items():
        path = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        lines += compared(name, wanted, partial(written, tree))
    return lines
