"""Where the operations of sampling and of the verdict are computed, by engine: for people to open."""

from __future__ import annotations

from specscope.trace.record.records import RunInfo

SHAPED = "specscope/speculate/sampling.py"
OURS = {
    "logit bias": f"{SHAPED} shaped, _add_bias_",
    "repetition penalty": f"{SHAPED} shaped, _penalise_",
    "presence penalty": f"{SHAPED} shaped, _penalise_",
    "frequency penalty": f"{SHAPED} shaped, _penalise_",
    "penalties": f"{SHAPED} shaped, _penalise_; specscope/speculate/counts.py TokenCounts",
    "form": "specscope/speculate/allowed.py mask_",
    "temperature": f"{SHAPED} scaled",
    "min-p": f"{SHAPED} _softmax_",
    "top-k": f"{SHAPED} _softmax_",
    "top-p": f"{SHAPED} _softmax_, _beyond_top_p",
    "softmax": f"{SHAPED} _softmax_",
    "logits": f"{SHAPED} target_rows, all_probabilities: what they are given",
    "parameters": "specscope/speculate/verify/inputs.py _rows; specscope/speculate/drafters/base.py Context.rows",
    "rules": f"{SHAPED} all_probabilities",
    "rows": "specscope/speculate/verify/inputs.py VerifyBatch; specscope/kernels/flat_trees.py FlatTrees",
    "p": "specscope/speculate/verify/left.py target_rows",
    "q": "specscope/speculate/verify/left.py drafter_row",
    "coin": "specscope/speculate/verify/inputs.py step_batch; specscope/trace/record/coins.py coins",
    "acceptance": "specscope/speculate/verify/host.py _try",
    "final draw": "specscope/speculate/verify/host.py verify, _reject; specscope/speculate/draws.py draw",
}
V1, V2 = "vllm.v1.sample", "vllm.v1.worker.gpu"
PENALISED = (
    f"{V1}.rejection_sampler RejectionSampler.apply_penalties, for the bonus {V1}.sampler Sampler.apply_penalties"
)
CONSTRAINED = f"{V1}.rejection_sampler apply_sampling_constraints, for the bonus {V1}.sampler Sampler.sample"
JUDGED = f"{V1}.rejection_sampler rejection_sample; {V2}.spec_decode.rejection_sampler_utils rejection_sample"
VLLM = {
    "logit bias": f"{V1}.logits_processor LogitBiasLogitsProcessor; {V2}.sample.logit_bias LogitBiasState.apply",
    **dict.fromkeys(
        ("repetition penalty", "presence penalty", "frequency penalty", "penalties"),
        f"{PENALISED}; {V2}.sample.penalties PenaltiesState.apply",
    ),
    "form": f"{V1}.logits_processor.builtin MinTokensLogitsProcessor; {V2}.sample.logit_bias LogitBiasState.apply",
    "temperature": f"{CONSTRAINED}; {V2}.sample.states SamplingStates.apply_temperature",
    "min-p": f"{V1}.logits_processor.builtin MinPLogitsProcessor; {V2}.sample.states SamplingStates.apply_min_p",
    **dict.fromkeys(("top-k", "top-p"), f"{CONSTRAINED}; {V2}.sample.states SamplingStates.apply_top_k_top_p"),
    "softmax": f"{V1}.rejection_sampler rejection_sample; {V2}.spec_decode.rejection_sampler_utils",
    "logits": f"{V1}.rejection_sampler RejectionSampler.forward; {V2}.sample.sampler Sampler.apply_sampling_params",
    "parameters": f"{V1}.rejection_sampler expand_batch_to_tokens; {V2}.sample.states SamplingStates",
    "rules": f"{V1}.rejection_sampler RejectionSampler.forward; {V2}.sample.sampler Sampler.apply_sampling_params",
    **dict.fromkeys(("rows", "p", "q", "coin", "acceptance"), JUDGED),
    "final draw": f"{V1}.rejection_sampler sample_recovered_tokens; "
    f"{V2}.spec_decode.rejection_sampler_utils _resample_kernel",
}


def code_of(run: RunInfo | None, operation: str) -> str:
    """Where the engine that made a run computes an operation; "" where that is not known."""
    if run is None:
        return ""
    return (OURS if run.is_ours else VLLM if "vllm" in run.versions else {}).get(operation, "")
