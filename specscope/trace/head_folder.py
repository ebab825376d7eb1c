"""The folder of a drafter's head: what kind of head lies in it, and in which files. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specscope.errors import UserError
from specscope.trace.files import read_object
from specscope.trace.head_keys import unknown

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which they are looked for
INDEX = ".index.json"  # behind the name: weights in several files, and which tensor lies in which
ALGORITHMS = ("eagle", "eagle3", "peagle")  # of vLLM's speculators that run here
# Heads of other kinds, by a word in the name of their model or algorithm; the first that fits
OTHERS = {
    "dspark": "DSpark",
    "domino": "Domino",
    "dflash": "DFlash",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "mlp_speculator": "MLP speculator",
    "mlpspeculator": "MLP speculator",
    "mtp": "MTP",
    "nextn": "MTP",
}
OTHER_KEYS = {"dflash_config": "DFlash", "medusa_num_heads": "Medusa"}  # the same, by a key of its config
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of MTP layers, and of whole models that have some


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head, by its config: an EAGLE-3 one, or one that does not run here.

    The config of an older EAGLE head is a plain model's.
    """
    try:
        config = read_object(folder / "config.json")
    except UserError:  # the loader reports what is wrong with it
        return False
    return "draft_vocab_size" in config or bool(other_kind(folder, config))


def check_head(folder: Path) -> None:
    """Refuse a head that does not run here: by its kind, or by the key of its config that is not known.

    Raises UserError.
    """
    config = read_object(folder / "config.json")
    check_kind(folder, config, "what runs here are EAGLE, EAGLE-3 and P-EAGLE heads")
    if key := unknown(config):
        raise UserError(
            f"{folder}/config.json has `{key}`: it may change what the head computes, and is not implemented"
        )


def check_kind(folder: Path, config: Mapping[str, Any], instead: str) -> None:
    """Refuse a folder that holds a head of another kind than ours. `instead`: what is wanted. Raises UserError."""
    if kind := other_kind(folder, config):
        raise UserError(f"{folder} holds a drafter of the kind {kind}: {instead}")


def other_kind(folder: Path, config: Mapping[str, Any]) -> str:
    """The kind of a head that does not run here, as people call it; "" for any other folder."""
    names = [name.lower() for name in _names(config)]
    by_name = (kind for word, kind in OTHERS.items() if any(word in name for name in names))
    by_key = (kind for key, kind in OTHER_KEYS.items() if config.get(key))
    algorithm = config.get("speculators_model_type")
    known = next(by_name, "") or next(by_key, "")
    if known or (isinstance(algorithm, str) and algorithm not in ALGORITHMS):
        return known or str(algorithm)
    tensors = _tensors(folder) if any(config.get(key) for key in MTP_KEYS) else []
    return "MTP" if tensors and all("mtp." in name for name in tensors) else ""


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    """Every name by which a config identifies its model."""
    architectures = config.get("architectures")
    yield from (str(name) for name in (architectures if isinstance(architectures, list) else ()))
    for where, key in (("", "model_type"), ("", "speculators_model_type"), ("speculators_config", "algorithm")):
        part = config.get(where) if where else config
        if isinstance(part, Mapping):
            yield str(part.get(key) or "")


def weight_files(folder: Path) -> list[Path]:
    """A head's weight files: a single one, or those that an index names. Raises UserError."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / (name + INDEX)).is_file():
            return [folder / shard for shard in sorted(set(_weight_map(folder / (name + INDEX)).values()))]
    raise UserError(f"{folder} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}, nor an index of several")


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises UserError for files that are not there, or not in the same folder."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index} does not say in `weight_map` which tensor lies in which file")
    for file in sorted(set(files.values())):
        if Path(file).name != file or not (index.parent / file).is_file():
            raise UserError(f"{index} names {file!r}, and there is no such file beside it")
    return files


def _tensors(folder: Path) -> list[str]:
    """The names of a head's tensors, where they can be read without loading the weights."""
    from safetensors import SafetensorError, safe_open

    names: list[str] = []
    try:
        for file in weight_files(folder):
            with safe_open(file, framework="numpy") as tensors:
                names += tensors.keys()
    except (OSError, UserError, SafetensorError):  # the loader says what is wrong with them
        return []
    return names
