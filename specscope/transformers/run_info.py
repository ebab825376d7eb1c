"""RunInfo and parameters of a transformers run, from its models and its GenerationConfig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specscope.trace.inside.recorder import ReadParams, label, params_of, run_of
from specscope.trace.record.records import RunInfo

# Our name of a drafter, by the class that generates candidates. The class itself is in RunInfo.speculation.
DRAFTERS = {
    "AssistedCandidateGenerator": "draft_model",
    "EarlyExitCandidateGenerator": "draft_model",
    "AssistedCandidateGeneratorDifferentTokenizers": "draft_model",
    "UniversalSpeculativeDecodingGenerator": "draft_model",
    "PromptLookupCandidateGenerator": "ngram",
    "MTPCandidateGenerator": "mtp",
    "DFlashTokenCandidateGenerator": "dflash",
    "SinglePositionMultiTokenCandidateGenerator": "gemma4_assistant",
}

# Processors that SamplingParams has a word for, where they are the config's own: its names, and theirs
TOLD = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "MinLengthLogitsProcessor": ("min_length", "min_length"),
    "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", "min_new_tokens"),
}
OTHERS = "logits_processors"  # the label of all others


@dataclass(frozen=True)
class CandidateSource:
    """Who drafts. Of a candidate generator."""

    drafter: str
    model: Any = None  # the assistant, or the MTP layers; None where a text drafts
    early_exit: int = 0  # layers of the target that draft; 0 where all else does
    threshold: bool = False  # whether a draft ends behind a token that the assistant is not sure of
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(generator: Any) -> CandidateSource:
        """Of what transformers made for a request."""
        bases = [base.__name__ for base in type(generator).__mro__]
        settings = {"method": bases[0], "num_speculative_tokens": most_drafted(generator)}
        if (ngram := getattr(generator, "max_matching_ngram_size", None)) is not None:
            settings["max_matching_ngram_size"] = ngram
        return CandidateSource(
            next((DRAFTERS[name] for name in bases if name in DRAFTERS), "other"),
            getattr(generator, "assistant_model", None) or getattr(generator, "mtp_model", None),
            getattr(generator, "assistant_early_exit", None) or 0,
            hasattr(generator, "assistant_confidence_threshold"),
            settings,
        )

    @property
    def path(self) -> str:
        """Where its model is, as it was named; self:N for the target's first layers."""
        if self.early_exit:
            return f"self:{self.early_exit}"
        return "" if self.model is None else path_of(self.model)


def most_drafted(generator: Any) -> int:
    """How many tokens a generator drafts at most in its next round."""
    names = ("num_assistant_tokens", "num_output_tokens", "num_mtp_layers")
    counts = [count for name in names if (count := getattr(generator, name, None)) is not None]
    return int(counts[0] if counts else getattr(generator, "block_size", 1) - 1)


def path_of(model: Any) -> str:
    """The folder or hub name that a model was loaded from; "" for one made from a configuration."""
    return str(getattr(model.config, "_name_or_path", "") or "")


def name_of(model: Any) -> str:
    """A model's name as people know it: its folder's, else its class's."""
    return path_of(model).rstrip("/").rsplit("/", 1)[-1] or type(model).__name__


def run_info(model: Any, source: CandidateSource, config: Any, version: str, evidence: str) -> RunInfo:
    """`config`: the GenerationConfig of the run's first request."""
    text = model.config.get_text_config()
    count = source.settings["num_speculative_tokens"]
    way = "sampled" if config.do_sample else "top"
    return run_of(
        "transformers",
        version,
        name_of(model),
        path_of(model),
        source.path,
        model.dtype,
        revision=getattr(model.config, "_commit_hash", None),
        drafter=source.drafter,
        draft_model="" if source.model is None else source.path.rsplit("/", 1)[-1] or name_of(source.model),
        tree=str(count) if source.drafter == "ngram" else f"{way}:{count}",
        device=str(torch.cuda.get_device_name() if model.device.type == "cuda" else model.device.type),
        eos_tokens=eos_tokens(config),
        max_context=int(getattr(text, "max_position_embeddings", 0) or config.max_length),
        evidence=evidence,
        speculation=dict(source.settings),
    )


def eos_tokens(config: Any) -> tuple[int, ...]:
    """Tokens that end an output."""
    eos = getattr(config, "_eos_token_tensor", None)
    return () if eos is None else tuple(eos.reshape(-1).tolist())


def read_params(config: Any, prompt: int, processors: Iterable[Any]) -> ReadParams:
    """(The parameters that specscope has, what else shapes p as labels). `prompt`: its tokens."""
    others, due = list[str](), dict(TOLD)
    for processor in processors:
        asked, own = due.pop(name := type(processor).__name__, ("", ""))
        if not own or getattr(processor, own, None) != getattr(config, asked):
            others.append(name)
    labels = {OTHERS: label(", ".join(others))} if others else {}
    values: dict[str, Any] = {
        "repetition_penalty": config.repetition_penalty or 1.0,
        "max_tokens": max(int(config.max_length) - prompt, 1),
        "min_tokens": max(config.min_new_tokens or 0, (config.min_length or 0) - prompt, 0),
        "stop": config.stop_strings,
    }
    if config.do_sample:
        temperature = 1.0 if config.temperature is None else config.temperature
        values |= {"temperature": temperature, "top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}
    return params_of(values, labels)
