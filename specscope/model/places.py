"""Where a user says that a model or a head is, and on what it runs: what can be refused before torch is imported."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specscope.errors import UserError
from specscope.plans import dflash
from specscope.plans.heads import check_head, check_kind, head_kind, unknown
from specscope.whole_file import read_object

if TYPE_CHECKING:
    import torch

DEVICE = re.compile(r"auto|(cpu|cuda)(:\d{1,3})?")


def model_place(target: str) -> Path | None:
    """The folder or .gguf file that a --target names; None for a hub name. Raises UserError where there is neither."""
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"no such file: {target}")
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{target} is not a Hugging Face model: it has no config.json")
        check_kind(path, read_object(path / "config.json"), "give a whole model", runs=False)
        return path
    if path.exists() or target.startswith((".", "/", "~")) or target.count("/") > 1:
        raise UserError(f"no model at {target}: give a Hugging Face folder, a hub name or a .gguf file")
    return None


def check_model(target: str | None) -> None:
    """Refuse a --target that is nowhere: no folder, no file, not the default one, and not on the hub. UserError."""
    if target is None:
        from specscope.model.bundled import check_bundled

        check_bundled()
    elif model_place(target) is None:
        from specscope.model.hub import hub_arguments

        hub_arguments(target)


def on_disk(target: str | None) -> Path | None:
    """Where the model that a --target names lies on this machine; None where it does not. Nothing is fetched."""
    if target is None:
        from specscope.model.bundled import converted_folder

        return converted_folder()
    try:
        place = model_place(target)
    except UserError:
        return None
    if place is not None:
        return place
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(target, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def config_of(target: str | None) -> dict[str, Any]:
    """What the config.json of a --target says of its text; {} where it is not on this machine, or cannot be read."""
    place = on_disk(target)
    if place is None or not place.is_dir():
        return {}
    try:
        raw = read_object(place / "config.json")
    except UserError:  # the loader says what is wrong with it
        return {}
    text = raw.get("text_config", raw)
    return text if isinstance(text, dict) else {}


def check_layers(wanted: int, layers: int, name: str) -> None:
    """Raises UserError where self:N asks for more than a part of the target."""
    if wanted >= layers:
        raise UserError(f"--draft-model self:N takes 1 to {layers - 1} layers of {name}")


def check_context(wanted: int, longest: int, name: str) -> None:
    """Raises UserError for a --max-context that the target was not made for."""
    if not 2 <= wanted <= longest:
        raise UserError(f"max_context must be between 2 and {longest} for {name}")


# What of a head's config is not known, by its kind
UNKNOWN = {"eagle": unknown, "dflash": dflash.unknown}


def head_place(folder: str) -> Path:
    """The folder of a head. Raises UserError where there is none, or one that does not run here."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"no head at {folder}: give a folder with config.json and model.safetensors")
    check_head(path, UNKNOWN[head_kind(path)])
    return path


def check_device(name: str) -> None:
    """Raises UserError for an unsupported device; whether it is present shows once torch is imported."""
    if not DEVICE.fullmatch(name):
        raise UserError(f"device {name!r} is not supported: use auto, cpu or cuda")


class Backend(StrEnum):
    """torch runs everywhere and is the reference; triton is for GPUs."""

    TORCH = "torch"
    TRITON = "triton"


def pick_backend(name: str, device: torch.device) -> Backend:
    """A --backend; auto is triton on a CUDA GPU. Raises UserError where it cannot run."""
    if name == "auto":
        return Backend.TRITON if device.type == "cuda" else Backend.TORCH
    backend = Backend(name)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend is Backend.TRITON and device.type != "cuda" and not interpreted:
        raise UserError("the triton backend needs a CUDA GPU (TRITON_INTERPRET=1 emulates one, slowly, for tests)")
    return backend
