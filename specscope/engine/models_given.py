"""Which models a run was given: their paths as they were given, and digests of what lay there. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specscope.engine.config import EngineConfig
from specscope.model.places import on_disk
from specscope.trace.model_digest import model_digest, of_layers


@dataclass(frozen=True)
class ModelsGiven:
    """RunInfo's fields of the same names. Filled by `models_given`."""

    target_path: str = ""
    target_digest: str = ""
    draft_path: str = ""
    draft_digest: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether all that was given is known."""
        return bool(self.target_digest) and (bool(self.draft_digest) or not self.draft_path)


def models_given(config: EngineConfig) -> ModelsGiven:
    """Of an engine. Half a second for each 270 MB that were never hashed on this machine."""
    target = given_digest(config.target)
    told = ModelsGiven(config.target or "", target)
    if not config.model_part:
        return told
    if config.model_part == "eagle":
        digest = model_digest(Path(config.head).expanduser())
    elif config.draft_layers is not None:
        digest = of_layers(target, config.draft_layers)
    else:
        digest = given_digest(config.draft_model)
    return ModelsGiven(told.target_path, target, config.draft_model or "", digest)


def given_digest(target: str | None) -> str:
    """Of the model that a --target names; "" where it is not on this machine."""
    place = on_disk(target)
    return "" if place is None else model_digest(place)
