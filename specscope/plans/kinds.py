"""The kinds of drafters, a row each: config, doctor, judges and the plugins read what a kind is here, and only here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class DraftedBy(Enum):
    """Where drafts come from."""

    HEAD = "head"  # modules that continue the target's hidden states
    MODEL = "model"  # a model of its own
    TEXT = "text"  # a search in the text


@dataclass(frozen=True)
class Kind:
    """A kind of drafter."""

    name: str  # of --drafter, and in records
    family: DraftedBy
    called: str = ""  # its model, as people call it
    tree: str = ""  # of --tree, where it is not given; "": as deep a chain as its config tells
    runs: bool = False  # whether our engine and our judges run it; others are known by what they are
    in_target: bool = False  # whether it lies in the target's checkpoint, and no other folder is given
    one_pass: bool = False  # all depths come from one pass, whatever the model's config says
    also: tuple[str, ...] = ()  # names of the method in vLLM, SGLang and speculators, in small letters
    words: tuple[str, ...] = ()  # in the names by which a head's config identifies its model, in small letters
    key: str = ""  # of a head's config that no other kind has


KINDS = (
    Kind("eagle", DraftedBy.HEAD, "head", "dynamic:3,depth=2,top=2", runs=True, also=("eagle3", "peagle", "nextn")),
    Kind("ngram", DraftedBy.TEXT, tree="3x5", runs=True, also=("ngram_gpu",)),
    Kind("suffix", DraftedBy.TEXT, tree="dynamic:16,depth=12", runs=True),
    Kind("draft_model", DraftedBy.MODEL, "draft model", "5", runs=True, also=("standalone",)),
    Kind("dspark", DraftedBy.HEAD, "DSpark", one_pass=True, words=("dspark",)),
    Kind("domino", DraftedBy.HEAD, "Domino", words=("domino",)),
    Kind("dflash2", DraftedBy.HEAD, "DFlash2", one_pass=True, words=("dflash2",)),
    Kind("dflash", DraftedBy.HEAD, "DFlash", runs=True, one_pass=True, words=("dflash",), key="dflash_config"),
    Kind("medusa", DraftedBy.HEAD, "Medusa", words=("medusa",), key="medusa_num_heads"),
    Kind("hydra", DraftedBy.HEAD, "Hydra", words=("hydra",)),
    Kind("mtp", DraftedBy.HEAD, "MTP", "1", True, True, also=("frozen_kv_mtp",), words=("mtp", "nextn")),
    Kind("mlp_speculator", DraftedBy.HEAD, "MLP speculator", words=("mlp_speculator", "mlpspeculator")),
)
BY_NAME = {kind.name: kind for kind in KINDS}
RUN_HERE = tuple(kind.name for kind in KINDS if kind.runs)
_ALSO = {name: kind.name for kind in KINDS for name in kind.also}


def drafter_named(method: str) -> str:
    """The name of the kind that another engine's method is; the method itself where it is none of ours."""
    return _ALSO.get(method.lower(), method)


def _parts(drafter: str) -> Iterator[Kind]:
    """The kinds of a drafter of ours; two drafted together in older captures (suffix+eagle)."""
    return (kind for name in drafter.split("+") if (kind := BY_NAME.get(name)) is not None and kind.runs)


def text_part(drafter: str) -> str:
    """The part of our drafter that searches the text, alone or combined; "" for none."""
    return next((kind.name for kind in _parts(drafter) if kind.family is DraftedBy.TEXT), "")


def model_part(drafter: str) -> str:
    """The part of our drafter that runs a model, alone or combined; "" for none."""
    return next((kind.name for kind in _parts(drafter) if kind.family is not DraftedBy.TEXT), "")


def lies_in_target(drafter: str) -> bool:
    """Whether our drafter's model is a part of the target's checkpoint."""
    return any(kind.in_target for kind in _parts(drafter))


def runs_head(drafter: str) -> bool:
    """Whether our drafter, alone or combined, runs a head over the target, and no model of its own."""
    return any(kind.family is DraftedBy.HEAD for kind in _parts(drafter))
