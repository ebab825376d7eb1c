"""What the hooks rely on in vLLM: the functions that they wrap, their parameters, and the attributes that they read.

No version is asked for: vLLM's sources are compared with these. Where something differs nothing is wrapped, and the
plugin says so; what fits and is no version that was tried is used, and the plugin says that.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from specscope.trace.inside.hooking import HookedCall, wrap
from specscope.trace.inside.known import Functions, differing, differing_in_text, signatures, source_of

SCHEDULER = "vllm.v1.core.sched.scheduler"
PLAIN = "vllm.v1.sample.sampler"
REJECTION = "vllm.v1.sample.rejection_sampler"
RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_PLAIN = "vllm.v1.worker.gpu.sample.sampler"
V2_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
V2_DRAFTER = "vllm.v1.worker.gpu.spec_decode.speculator"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
TRIED = ("0.32.0", "0.33.0")

_SHARED: Mapping[str, Functions] = {
    SCHEDULER: {
        "Scheduler.add_request": "self request",
        "Scheduler._preempt_request": "self request timestamp drop_stale_output",
        "Scheduler._free_request": "self request delay_free_blocks",
        "Scheduler.schedule": "self throttle_prefills",
        "Scheduler.update_from_output": "self scheduler_output model_runner_output",
    },
}
_V1: Mapping[str, Functions] = {
    PLAIN: {
        "Sampler.sample": "self logits sampling_metadata logprobs_mode_override",
    },
    REJECTION: {
        "RejectionSampler.forward": "self metadata draft_probs logits sampling_metadata",
        "rejection_sample": (
            "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
            "bonus_token_ids sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel",
            "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
            "bonus_token_ids sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel "
            "fly_window_size fly_entropy_threshold fly_entropy_top_k",
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
}
_V2: Mapping[str, Functions] = {
    V2_PLAIN: {
        "Sampler.__call__": "self logits input_batch",
        "Sampler.sample": (
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
            "seq_lens_upper_bound_np return_logprobs"
        ),
        "Sampler._sample_random": (
            "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p use_fused_sampler",
            "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p has_topp_only_rows "
            "use_fused_sampler",
        ),
    },
    V2_REJECTION: {
        "RejectionSampler.__call__": "self logits input_batch draft_logits invalid_drafts",
        "RejectionSampler._verify": (
            "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np "
            "expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled"
        ),
    },
    V2_DRAFTER: {
        "DraftModelSpeculator.compute_draft_logits": "self hidden_states spec_step_idx",
        "DraftModelSpeculator.sample_draft": (
            "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits "
            "spec_step_idx",
            "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits "
            "spec_step_idx num_steps",
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
# Attributes that the hooks read, by class. What they look for and can do without is not among them.
_SHARED_READ: Mapping[str, Mapping[str, str]] = {
    SCHEDULER: {"Scheduler": "running waiting kv_cache_manager get_num_unfinished_requests"},
    "vllm.v1.core.kv_cache_manager": {"KVCacheManager": "block_pool"},
    "vllm.v1.core.block_pool": {"BlockPool": "get_num_free_blocks num_gpu_blocks"},
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": (
            "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens finished_req_ids"
        ),
        "NewRequestData": "req_id prompt_token_ids sampling_params block_ids",
        "CachedRequestData": "req_ids resumed_req_ids new_block_ids",
    },
    "vllm.v1.request": {
        "Request": (
            "request_id arrival_time trace_headers stop_reason get_finished_reason output_token_ids prompt_token_ids "
            "sampling_params"
        )
    },
    "vllm.config.vllm": {"VllmConfig": "model_config cache_config parallel_config speculative_config"},
    "vllm.config.model": {
        "ModelConfig": "model served_model_name revision dtype seed max_model_len hf_config try_get_generation_config"
    },
    "vllm.config.cache": {"CacheConfig": "num_gpu_blocks block_size"},
    "vllm.config.parallel": {"ParallelConfig": "data_parallel_rank"},
    "vllm.config.speculative": {"SpeculativeConfig": "method num_speculative_tokens draft_sample_method"},
}
_V1_READ: Mapping[str, Mapping[str, str]] = {
    RUNNER: {"GPUModelRunner": "vllm_config model_config input_batch discard_request_mask"},
    "vllm.v1.worker.gpu_input_batch": {"InputBatch": "req_ids num_computed_tokens_cpu block_table"},
    "vllm.v1.worker.block_table": {"MultiGroupBlockTable": "block_tables", "BlockTable": "block_table"},
    "vllm.v1.spec_decode.metadata": {
        "SpecDecodeMetadata": "num_draft_tokens draft_token_ids target_logits_indices bonus_logits_indices"
    },
    "vllm.v1.sample.metadata": {"SamplingMetadata": "all_greedy temperature top_p top_k"},
    "vllm.v1.outputs": {"SamplerOutput": "sampled_token_ids"},
}
_V2_READ: Mapping[str, Mapping[str, str]] = {
    V2_RUNNER: {"GPUModelRunner": "vllm_config model_config adaptive_verification"},
    V2_PLAIN: {"Sampler": "sampling_states"},
    V2_REJECTION: {"RejectionSampler": "sampler use_block_verification"},
    V2_DRAFTER: {"DraftModelSpeculator": "max_num_reqs num_speculative_steps draft_logits"},
    "vllm.v1.worker.gpu.sample.states": {"SamplingStates": "temperature seeds apply_top_k_top_p"},
    "vllm.v1.worker.gpu.buffer_utils": {"UvaBackedTensor": "gpu np"},
    "vllm.v1.worker.gpu.input_batch": {
        "InputBatch": (
            "req_ids num_reqs num_draft_tokens num_draft_tokens_per_req num_scheduled_tokens num_computed_tokens_np "
            "prefill_len_np seq_lens_cpu_upper_bound cu_num_logits"
        )
    },
    "vllm.v1.worker.gpu.spec_decode.adaptive_verification": {"AdaptiveVerificationManager": "_confidence_probs"},
}
WRAPPED: Mapping[str, Functions] = {**_SHARED, **_V1, **_V2}


def parameters_of(module: str, name: str) -> tuple[str, ...]:
    """What vLLM calls the parameters of a function that is wrapped, in the oldest version that has all it passes."""
    return signatures(WRAPPED[module], name)[0]


def wrap_known(module: str, owner: object, name: str, hook: Callable[[HookedCall], Any]) -> None:
    """Have a function of the tables above, `Class.function` or `function`, go through the hook. `owner` has it."""
    wrap(owner, name.rsplit(".", 1)[-1], hook, parameters_of(module, name))


@dataclass(frozen=True)
class Fit:
    """What differs in a vLLM's sources, a line each; a runner's own parts are no matter to the other."""

    shared: tuple[str, ...]
    v1: tuple[str, ...]
    v2: tuple[str, ...]

    @property
    def lacking(self) -> str:
        """Why neither runner gives evidence; "" where one does."""
        differing = self.shared or (self.v2 if self.v1 and self.v2 else ())
        return differing[0] if differing else ""


def here() -> Fit:
    """Of the vLLM that this process imports."""
    spec = importlib.util.find_spec("vllm")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    return fit(Path(roots[0])) if roots else Fit(("its source code was not found",), (), ())


def fit(root: Path) -> Fit:
    """Compare vLLM's sources under `root` (its folder `vllm`) as text: nothing is imported."""
    parts = ((_SHARED, _SHARED_READ), (_V1, _V1_READ), (_V2, _V2_READ))
    return Fit(*(tuple(_in_text(root, wrapped, read)) for wrapped, read in parts))


def remark(version: str) -> str:
    """What is to be said of a version that fits; "" where it was tried. `0.32.0+cpu` is 0.32.0."""
    if version.split("+")[0] in TRIED:
        return ""
    return f"vLLM {version} was not tried, but everything that specscope hooks is as in {', '.join(TRIED)}"


def differences(module: ModuleType) -> list[str]:
    """What the hooks would wrap in the module, and is not as they know it; a line each."""
    return list(differing(module, WRAPPED[module.__name__]))


def _in_text(root: Path, wrapped: Mapping[str, Functions], read: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for module in dict.fromkeys([*wrapped, *read]):
        tree = source_of(root, module)
        yield from differing_in_text(tree, module, wrapped.get(module, {}))
        for owner, names in read.get(module, {}).items():
            there = _attributes(tree, owner)
            yield from (f"{module}.{owner}.{name} is missing" for name in names.split() if name not in there)


def _attributes(tree: ast.Module, owner: str) -> set[str]:
    """What a class has of its own: its fields and methods, and what its methods set on `self`."""
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
    names: set[str] = set()
    for node in [] if found is None else ast.walk(found):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
