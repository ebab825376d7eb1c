"""What the hooks rely on in SGLang 0.5.21 to 0.5.23: the functions that they wrap, and their parameters.

Signatures decide, and not numbers: another version is used where it fits. Where it does not, nothing is wrapped, and
the plugin says what differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

from specscope.trace.inside.hooking import Functions, differing, log

VERIFY = "sglang.srt.speculative.eagle_utils"
DRAFT = "sglang.srt.speculative.eagle_worker_v2"
DFLASH = "sglang.srt.speculative.dflash_worker_v2"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
TREE = "sglang.kernels.ops.speculative.sampling"
CHAIN = "sglang.kernels.ops.speculative.reject_sampling"
OPTIONAL = (TREE, DFLASH)  # where they cannot be imported, on this device or at all, SGLang does without them

_SAMPLING = (
    "predicts accept_index accept_token_num candidates retrive_index retrive_next_token retrive_next_sibling "
    "uniform_samples uniform_samples_for_final_sampling target_probs draft_probs threshold_single threshold_acc "
    "deterministic"
)
_EAGLE = "verify_input batch logits_output grammar_mask uno_target_max_top_k"
_BLOCK = "self candidates next_token_logits sampling_info draft_input prefix_lens bs"
WRAPPED: Mapping[str, Functions] = {
    VERIFY: {
        "eagle_sample": (_EAGLE, f"{_EAGLE} watermark_state watermark_full_mask"),  # the second since 0.5.22
        "organize_draft_results": "score_list token_list parents_list num_draft_token",
        "_verify_uses_greedy": "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
    },
    DRAFT: {"EagleDraftWorker.draft": "self batch with_topology"},
    DFLASH: {"DFlashWorkerV2._accept_block": (_BLOCK, f"{_BLOCK} target_predict")},  # the second since 0.5.23
    RESULTS: {
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens": "self result batch",
        "SchedulerBatchResultProcessor.process_batch_result_decode": "self batch result",
        "SchedulerBatchResultProcessor.process_batch_result_prefill": "self batch result",
    },
    TREE: {"tree_speculative_sampling_target_only": _SAMPLING},
    CHAIN: {"chain_speculative_sampling_triton": (_SAMPLING, f"{_SAMPLING} block_verification")},  # since 0.5.22
}


def imported() -> Iterator[tuple[str, ModuleType]]:
    """Each of these modules with its name, but for those that this device has not."""
    for name in WRAPPED:
        try:
            yield name, importlib.import_module(name)
        except Exception as error:
            if name not in OPTIONAL:
                raise
            log.warning("specscope: without %s: %r", name, error)


def difference(modules: Iterable[ModuleType]) -> str:
    """What the hooks would wrap in these modules, and is not as they know it, the first one; "" where all is."""
    return next((line for module in modules for line in differing(module, WRAPPED[module.__name__])), "")
