"""What the hooks rely on in SGLang: the functions that they wrap, and their parameters, in the versions that are known.

Signatures decide, and not numbers: a version that is not known is used where it fits a table. Where it fits none,
nothing is wrapped, and the plugin says what differs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from specscope.trace.inside.hooking import Signatures, compared, live, written

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
_23: Mapping[str, dict[str, str]] = {
    VERIFY: {
        "eagle_sample": (
            "verify_input batch logits_output grammar_mask uno_target_max_top_k watermark_state watermark_full_mask"
        ),
        "organize_draft_results": "score_list token_list parents_list num_draft_token",
        "_verify_uses_greedy": "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
    },
    DRAFT: {"EagleDraftWorker.draft": "self batch with_topology"},
    DFLASH: {
        "DFlashWorkerV2._accept_block": (
            "self candidates next_token_logits sampling_info draft_input prefix_lens bs target_predict"
        )
    },
    RESULTS: {
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens": "self result batch",
        "SchedulerBatchResultProcessor.process_batch_result_decode": "self batch result",
        "SchedulerBatchResultProcessor.process_batch_result_prefill": "self batch result",
    },
    TREE: {"tree_speculative_sampling_target_only": _SAMPLING},
    CHAIN: {"chain_speculative_sampling_triton": f"{_SAMPLING} block_verification"},
}
# What differed before.
_22: Mapping[str, dict[str, str]] = {
    DFLASH: {
        "DFlashWorkerV2._accept_block": "self candidates next_token_logits sampling_info draft_input prefix_lens bs"
    }
}
_21: Mapping[str, dict[str, str]] = {
    VERIFY: {"eagle_sample": "verify_input batch logits_output grammar_mask uno_target_max_top_k"},
    CHAIN: {"chain_speculative_sampling_triton": _SAMPLING},
}


def _read(*tables: Mapping[str, dict[str, str]]) -> Mapping[str, Signatures]:
    """Later tables replace what earlier ones say of a function."""
    merged: dict[str, dict[str, tuple[str, ...]]] = {}
    for table in tables:
        for module, functions in table.items():
            merged.setdefault(module, {}).update({name: tuple(text.split()) for name, text in functions.items()})
    return merged


KNOWN: Mapping[str, Mapping[str, Signatures]] = {
    "0.5.21": _read(_23, _22, _21),
    "0.5.22": _read(_23, _22),
    "0.5.23": _read(_23),
}


def tables(version: str) -> list[Mapping[str, Signatures]]:
    """The version's signatures by module; of one that is not known all tables, the newest first."""
    public = ".".join(version.split("+")[0].split(".")[:3])
    return [KNOWN[public]] if public in KNOWN else list(KNOWN.values())[::-1]


def difference(modules: Sequence[ModuleType], version: str) -> str:
    """What the hooks would wrap in these modules, and is not as any table has it, the first one; "" where all is."""
    first = [next(_differences(modules, table), "") for table in tables(version)]
    return "" if "" in first else first[0]


def _differences(modules: Sequence[ModuleType], table: Mapping[str, Signatures]) -> Iterator[str]:
    for module in modules:
        wanted = table[module.__name__]
        yield from compared(module.__name__, wanted, partial(_there, module, wanted))


def _there(module: ModuleType, wanted: Signatures, name: str) -> tuple[str, ...] | None:
    return live(module, name, wanted[name])


def differences_in_text(root: Path, version: str) -> list[str]:
    """Likewise from SGLang's sources under `root` (its folder `sglang`), all of them: nothing is imported."""
    lines: list[str] = []
    for name, wanted in tables(version)[0].items():
        path = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        lines += compared(name, wanted, partial(written, tree))
    return lines
