"""RunInfo and parameters of an SGLang server, in specscope's terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specscope.plans.kinds import drafter_named
from specscope.trace.checked import decoded
from specscope.trace.inside.recorder import ReadParams, label, params_of, run_of, version_of
from specscope.trace.record.params import FORM
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason, RunInfo

# Settings, behind `speculative_`, that say how it drafts and verifies
SETTINGS = (
    "algorithm draft_model_path num_steps eagle_topk num_draft_tokens use_rejection_sampling use_block_verification "
    "accept_threshold_single accept_threshold_acc adaptive token_map"
)
GREEDILY = "decoded_greedily"  # a setting of ours: every request is, whatever its temperature
IGNORED = "ignored by SGLang"
FORMS = ("json_schema", "regex", "ebnf", "structural_tag")
SAME = ("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
ALL = 1 << 30  # top_k of a request that asks for none


def settings_of(bag: Any, *, greedily: bool) -> dict[str, Any]:
    """`bag`: SGLang's get_spec()."""
    settings = {name: getattr(bag, name, None) for name in (f"speculative_{short}" for short in SETTINGS.split())}
    plain = {name: value for name, value in settings.items() if value not in (None, "", False)}
    plain["method"] = str(plain.get("speculative_algorithm", "")).lower()
    if greedily:
        plain[GREEDILY] = True
    made: dict[str, Any] = decoded(json.dumps(plain, default=str))
    return made


def tree_string(settings: Mapping[str, Any]) -> str:
    """A chain as a tree string; a tree as EAGLE-2's, by SGLang's numbers."""
    drafted = int(settings.get("speculative_num_draft_tokens") or 1) - 1
    topk, steps = int(settings.get("speculative_eagle_topk") or 1), settings.get("speculative_num_steps")
    if settings.get("method") == "ngram":
        return f"dynamic:{drafted},depth={drafted},top={min(topk, drafted)}"  # its breadth is kept as eagle_topk
    if topk > 1:
        return f"dynamic:{drafted},depth={steps},top={topk}"
    return f"{'sampled' if settings.get('speculative_use_rejection_sampling') else 'top'}:{drafted}"


def run_info(
    args: Any, config: Any, req: Any, settings: dict[str, Any], evidence: str, privacy: Privacy = Privacy.EVERYTHING
) -> RunInfo:
    """`args`: its ServerArgs; `config`: the target's ModelConfig; `req`: its first request."""
    return run_of(
        "sglang",
        version_of("sglang"),
        getattr(args, "served_model_name", None),
        str(args.model_path),
        str(settings.get("speculative_draft_model_path", "")),
        config.dtype,
        revision=getattr(args, "revision", None),
        drafter=drafter_named(str(settings["method"])),  # the algorithm itself is in RunInfo.speculation
        tree=tree_string(settings),
        seed=getattr(args, "random_seed", None),
        eos_tokens=tuple(sorted(getattr(req, "eos_token_ids", None) or ())),
        max_context=int(config.context_len),
        block_size=getattr(args, "page_size", None),
        evidence=evidence,
        speculation=settings,
        privacy=privacy,
    )


def read_params(params: Any, *, greedily: bool) -> ReadParams:
    """(The parameters that specscope has, the others as labels). `params`: SGLang's, which it has normalised.

    There a request that asked for temperature 0 has top_k 1.
    """
    labels, greedy = {}, params.top_k == 1
    if params.min_p:
        labels[IGNORED] = f"min_p={params.min_p}"  # where it speculates
    if params.logit_bias:
        labels["logit_bias"] = label(params.logit_bias)
    if form := next((name for name in FORMS if getattr(params, name, None)), None):
        labels[FORM] = label(f"{form}: {getattr(params, form)}")
    if greedily and not greedy:
        labels["temperature"] = f"{params.temperature:g} was requested, but this device decodes greedily"
    values: dict[str, Any] = {
        **{name: getattr(params, name) for name in SAME},
        "seed": params.sampling_seed,
        "max_tokens": params.max_new_tokens,
        "stop": params.stop_strs,
        "stop_token_ids": sorted(params.stop_token_ids or ()),
        "min_tokens": params.min_new_tokens,
    }
    if not (greedy or greedily):
        top_k = 0 if params.top_k >= ALL else max(params.top_k, 0)
        values |= {"temperature": params.temperature, "top_k": top_k, "top_p": params.top_p}
    return params_of(values, labels)


def end_reason(req: Any, eos: tuple[int, ...]) -> tuple[FinishReason, str, str]:
    """(Why a finished request ended, the stop string that matched, what went wrong). By what its reason says of it."""
    said, params = req.finished_reason.to_json(), req.sampling_params
    matched = said.get("matched")
    if said["type"] == "length":
        return FinishReason.LENGTH, "", ""
    if said["type"] == "abort":
        failed = said.get("status_code") is not None
        return (FinishReason.ERROR, "", str(said.get("message"))) if failed else (FinishReason.CANCELLED, "", "")
    if matched in eos and not params.ignore_eos:
        return FinishReason.EOS, "", ""
    is_asked = isinstance(matched, str) and matched in (params.stop_strs or ())
    return FinishReason.STOP, matched if is_asked else "", ""
