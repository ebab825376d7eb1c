"""What the hooks rely on in vLLM: the functions that they wrap, with their parameters, and its processes.

No version is asked for: each module is compared with these when it is imported. Where one differs nothing is wrapped
in it, and the plugin says so; what fits and is no version that was tried is used, and the plugin says that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from specscope.trace.inside.hooking import Functions, HookedCall, differing, signatures, wrap

SCHEDULER = "vllm.v1.core.sched.scheduler"
PLAIN = "vllm.v1.sample.sampler"
REJECTION = "vllm.v1.sample.rejection_sampler"
RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_PLAIN = "vllm.v1.worker.gpu.sample.sampler"
V2_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
V2_DRAFTER = "vllm.v1.worker.gpu.spec_decode.speculator"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
ENDS = "vllm.v1.engine.utils"  # where its server ends its engines
GRACE_SECONDS = 1.0  # for what a worker writes within 50 ms, on a busy machine
TRIED = ("0.32.0", "0.33.0")
Hooks = Mapping[str, Callable[[HookedCall], Any]]  # by `Class.function`, or `function`

_RULE = (
    "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits bonus_token_ids "
    "sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel"
)
_RANDOM = "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p"
_DRAFT = "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits spec_step_idx"
WRAPPED: Mapping[str, Functions] = {
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
        "rejection_sample": (_RULE, f"{_RULE} fly_window_size fly_entropy_threshold fly_entropy_top_k"),
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
            f"{_RANDOM} use_fused_sampler",
            f"{_RANDOM} has_topp_only_rows use_fused_sampler",
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
        "DraftModelSpeculator.sample_draft": (_DRAFT, f"{_DRAFT} num_steps"),
    },
    V2_RUNNER: {
        "GPUModelRunner.execute_model": (
            "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile "
            "context_len valid_dummy_state_slots randomize_inputs"
        ),
        "GPUModelRunner.sample_tokens": "self grammar_output",
    },
}


def parameters_of(module: str, name: str) -> tuple[str, ...]:
    """What vLLM calls the parameters of a function that is wrapped, in the oldest version that has all it passes."""
    return signatures(WRAPPED[module], name)[0]


def wrap_known(module: ModuleType, hooks: Hooks) -> None:
    """Have functions of a module of the tables above go through hooks."""
    for name, hook in hooks.items():
        owner, _, function = name.rpartition(".")
        known = parameters_of(module.__name__, name)
        wrap(getattr(module, owner) if owner else module, function, hook, known)


def remark(version: str) -> str:
    """What is to be said of a version that fits; "" where it was tried. `0.32.0+cpu` is 0.32.0."""
    if version.split("+")[0] in TRIED:
        return ""
    return f"vLLM {version} was not tried, but everything that specscope hooks is as in {', '.join(TRIED)}"


def differences(module: ModuleType) -> list[str]:
    """What the hooks would wrap in the module, and is not as they know it; a line each."""
    return list(differing(module, WRAPPED[module.__name__]))


def rank_of_worker() -> int | None:
    """This worker's place in its tensor-parallel group; None before the last pipeline stage, which alone samples."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group if get_pp_group().is_last_rank else None


def engine_number(runner: Any) -> int:
    """The number of this worker's engine. Every engine of a dense model has the data-parallel rank 0."""
    return int(runner.vllm_config.parallel_config.data_parallel_index)


def wrap_loaded(tell: Callable[[Any], object], module: ModuleType, name: str = "initialize_kv_cache") -> None:
    """Call `tell` with each of a module's model runners when it has its model and KV cache, or when it is made."""

    def loaded(call: HookedCall) -> Any:
        made = call()
        if not call.given.get("is_profiling", False):
            tell(call.args[0])
        return made

    wrap(module.GPUModelRunner, name, loaded)


def give_grace(module: ModuleType) -> None:
    """vLLM's server kills its engines in the moment in which it tells them to end: let it wait a moment for them.

    Their workers write the rest meanwhile, whether they end by themselves or not. `module`: vllm.v1.engine.utils.
    """

    def shutdown(call: HookedCall) -> Any:
        if call.given.get("timeout") != 0:
            return call()
        return call.original(*call.args[:1], **call.kwargs | {"timeout": GRACE_SECONDS})

    wrap(module, "shutdown", shutdown, ("procs", "timeout"))
