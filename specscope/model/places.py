"""Where a user says that a model or a head is, and on what it runs: what can be refused before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path

from specscope.errors import UserError
from specscope.trace.files import read_object
from specscope.trace.head_folder import check_head, check_kind

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
        check_kind(path, read_object(path / "config.json"), "give a whole model")
        return path
    if path.exists() or target.startswith((".", "/", "~")) or target.count("/") > 1:
        raise UserError(f"no model at {target}: give a Hugging Face folder, a hub name or a .gguf file")
    return None


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


def head_place(folder: str) -> Path:
    """The folder of an EAGLE head. Raises UserError where there is none, or one that does not run here."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"no EAGLE head at {folder}: give a folder with config.json and model.safetensors")
    check_head(path)
    return path


def check_device(name: str) -> None:
    """Raises UserError for what is no device of ours; whether it is there is seen when torch is."""
    if not DEVICE.fullmatch(name):
        raise UserError(f"device {name!r} is not supported: use auto, cpu or cuda")
