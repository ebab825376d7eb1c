"""Where our engine computes the operations of sampling, verdict and draws: for people to open."""

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
    "residual": "specscope/speculate/verify/left.py",
    "trial order": "specscope/speculate/verify/host.py _try",
    "path": "specscope/speculate/verify/host.py verify",
    "entropy": "specscope/speculate/verify/parents.py",
    "final draw": "specscope/speculate/verify/host.py verify, _reject; specscope/speculate/draws.py draw",
    "draft coins": "specscope/speculate/drafters/tree_builder.py coin",
    "draft order": "specscope/speculate/drafters/tree_builder.py take",
    "draft draw": "specscope/speculate/draws.py draw_siblings",
}


def code_of(run: RunInfo | None, operation: str) -> str:
    """Where an operation is computed; "" in another engine, which has more than one way and does not tell which."""
    return OURS.get(operation, "") if run is not None and run.is_ours else ""
