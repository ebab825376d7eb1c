"""`specscope diagnose --trainer FOLDER`: the head in training beside the head that served a capture, by weights,
vocabulary maps and settings of the two folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from specscope.analyze.findings import Exit
from specscope.analyze.table import Table
from specscope.analyze.text import VERDICT, TableBlock, header_block
from specscope.errors import UserError
from specscope.measure.judges import audit_options, target_named
from specscope.model.heads.eagle_head import HeadConfig, llama_config
from specscope.model.heads.head_runner import EMBEDDING, LoadedHead, load_head, read_tensors
from specscope.model.loader import load_model
from specscope.model.places import head_place
from specscope.plans.kinds import LAYER_IDS, lies_in_target, runs_head
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

LAYER = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act"),
    "attention_bias",
)


@dataclass(frozen=True)
class FolderDifference:
    """A tensor or a setting that is not the same on both sides."""

    key: str  # "weights: midlayer.mlp.up_proj.weight", "config: rope_theta"
    sentence: str


@dataclass(frozen=True)
class TrainerAudit:
    source: str
    trainer: str
    served: str
    tensors: int  # of the trained head
    settings: int  # likewise
    differences: tuple[FolderDifference, ...]  # weights and vocabulary maps first, then settings
    warnings: tuple[str, ...]

    @property
    def exit(self) -> Exit:
        return Exit.INCONSISTENT if self.differences else Exit.CONSISTENT

    @property
    def verdict(self) -> str:
        compared = f"{plural(self.tensors, 'tensor')} and {plural(self.settings, 'setting')} compared"
        if not self.differences:
            return f"The served head is the trained one: {compared}, none differs."
        first, more = self.differences[0], len(self.differences) - 1
        others = f", and {plural(more, 'other difference')}" if more else ""
        return f"The served head is not the trained one: {first.sentence}{others} ({compared})."

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exit": int(self.exit), "verdict": self.verdict}


def audit_trainer(
    history: History, source: str, folder: str, target: str | None, draft_model: str | None
) -> TrainerAudit:
    """Compare a head in training with the head that served a capture. Raises UserError."""
    run = history.run
    if run is not None and (not runs_head(run.drafter) or lies_in_target(run.drafter)):
        raise UserError(f"the capture's drafter is {run.drafter}: --trainer compares EAGLE heads")
    head_place(folder)
    options = audit_options(history, target, draft_model, None)
    assert run is not None  # otherwise audit_options has refused it
    if options.draft is None:
        raise UserError(options.why_no_draft)
    loaded, place = load_model(target_named(run, target), torch.device("cpu"), torch.float32), options.draft.path
    dtype = next(x.dtype for x in read_tensors(Path(place).expanduser()).values() if x.is_floating_point())
    trained, served = load_head(folder, loaded), load_head(place, loaded)
    weights, ours = _tensors(trained), _settings(trained.head.config)
    differences = [*_weights(weights, _tensors(served), dtype), *_other_settings(ours, _settings(served.head.config))]
    return TrainerAudit(source, folder, place, len(weights), len(ours), tuple(differences), options.notes)


def _weights(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[FolderDifference]:
    """Tensors of the served head that are not the trainer's, by more than rounding to `dtype`."""
    for name in {**ours, **theirs}:
        right, tensor, how = ours.get(name), theirs.get(name), ""
        if right is None or tensor is None:
            sides = ("served head", "checkpoint") if right is None else ("checkpoint", "served head")
            how = f"is in the {sides[0]} but not in the {sides[1]}"
        elif tensor.shape != right.shape:
            how = f"is {list(tensor.shape)} in the served head, {list(right.shape)} in training"
        elif right.is_floating_point():
            error = float((tensor - right).norm() / right.norm().clamp_min(1e-30))
            how = f"differs (relative {error:.2g})" if error > torch.finfo(dtype).eps else ""
        elif not torch.equal(tensor, right):
            how = f"differs at {int((tensor != right).sum()):,} of {right.numel():,} tokens"
        yield from [FolderDifference(f"weights: {name}", f"{name} {how}")] if how else []


def _tensors(loaded: LoadedHead) -> dict[str, Tensor]:
    """By published names, the embedding that it uses among them."""
    embedding: Any = loaded.embedding
    return {EMBEDDING: embedding.weight.detach().float(), **loaded.head.state_dict()}


def _other_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[FolderDifference]:
    """Settings that change what is computed, and are not the same, by their keys."""
    for key in {**ours, **theirs}:
        right, value = ours.get(key), theirs.get(key)
        if value != right:
            how = f"{key} is {_shown(value)} in the served head, {_shown(right)} in training"
            yield FolderDifference(f"config: {key}", how)


def _settings(config: HeadConfig) -> dict[str, Any]:
    """What a head's config comes to, by its keys: what is left out has its default."""
    llama: Any = llama_config(config)
    return {
        "num_hidden_layers": config.layers,
        "draft_vocab_size": config.draft_vocab,
        LAYER_IDS: list(config.aux_layers),
        **config.flags,
        "head_dim": llama.head_dim,
        **{key: getattr(llama, key) for key in LAYER},
        **(llama.rope_parameters or {}),
        "sliding_window": list(config.windows),
        **({} if config.mask_token is None else {"mask_token_id": config.mask_token}),
    }


def _shown(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def render_trainer(audit: TrainerAudit, console: Console) -> None:
    """Print it. Text of models and users is never read as markup."""
    places = (("capture", audit.source), ("in training", audit.trainer), ("served", audit.served))
    console.print(header_block(places))
    for note in audit.warnings:
        console.print(Text(f"! {printable(note)}", style="yellow"))
    if audit.differences:
        rows = [(printable(each.key), printable(each.sentence)) for each in audit.differences]
        console.print(TableBlock(Table("", ("differs", "how"), rows, words=frozenset(["how"]))))
    console.print(Text(f"\n{printable(audit.verdict)}", style=VERDICT[audit.exit]))
