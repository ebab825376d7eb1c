"""What a model's files hold, as a digest: its weights and its configuration, whatever the folder is called.

A file is hashed once: the digest of one that is not small is kept in the user's cache, with its size, times and inode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specscope.errors import UserError
from specscope.plans.dflash import MASK_FILE
from specscope.plans.kinds import IN_SGLANG, LAYER_IDS, layer_ids
from specscope.user_cache import place, store
from specscope.whole_file import decoded, read_object

CHUNK = 2**24  # bytes that are hashed at once: hashlib lets other threads run meanwhile
THREADS = 4
SIZE = 16  # bytes of a digest
MOST_AT_START = 2**30  # bytes of weights, about a second
# Where a folder holds the weights twice, the first kind is what is loaded
WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin")
# Of a config.json: who wrote it, and what a run says itself
UNREAD = ("transformers_version", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype")


def model_digest(place: Path, limit: int | None = None) -> str:
    """The digest of a Hugging Face folder, an EAGLE head's folder or a .gguf file; "" where it cannot be computed.

    `limit`: gives "" where more bytes than this would have to be hashed.
    """
    try:
        kinds = (sorted(file for file in place.glob(pattern) if file.is_file()) for pattern in WEIGHTS)
        weights = [place] if place.is_file() else next(filter(None, kinds), [])
        weights += [file for file in (place / MASK_FILE,) if file.is_file()]
        unknown = sum(file.stat().st_size for file in weights if not _known(file))
        if not weights or (limit is not None and unknown > limit):
            return ""
        if weights == [place]:
            return _of_file(place)
        parts = [("config.json", _of_config(place / "config.json"))]
        return _hash(json.dumps([*parts, *((file.name, _of_file(file)) for file in weights)]).encode()).hex()
    except (OSError, ValueError, RecursionError, UserError):
        return ""


def digest_of_loaded(path: str) -> str:
    """Of a model that another engine has loaded; "" for a hub name, and where hashing would hold up its start."""
    place = Path(path or ".")
    return model_digest(place, MOST_AT_START) if path and place.exists() else ""


def shown(digest: str) -> str:
    first, mark, rest = digest.partition(":")
    return first[:8] + mark + rest


def of_layers(digest: str, layers: int) -> str:
    return digest and f"{digest}:{layers}"


def _of_config(file: Path) -> str:
    """The digest of a config. Keys that are off or unset are left out: they differ between releases of a library."""
    raw = read_object(file)
    settings = {name: value for name, value in raw.items() if name not in UNREAD and value not in (None, False)}
    ids = settings.get(LAYER_IDS)
    if isinstance(ids, list) and layer_ids(ids).get(IN_SGLANG) == settings.get(IN_SGLANG):
        settings.pop(IN_SGLANG, None)  # it says the same once more, for SGLang
    return _hash(json.dumps(settings, sort_keys=True).encode()).hex()


def _of_file(file: Path) -> str:
    """The digest of one file, from the cache where it is unchanged. Raises OSError."""
    if known := _known(file):
        return known
    before, digest = _stamp(file), _contents(file)
    if before[0] > CHUNK and _stamp(file) == before:
        with contextlib.suppress(ImportError, OSError, UserError):  # then it is hashed anew each time
            store(_place(file), {"stamp": before, "digest": digest})
    return digest


def _contents(file: Path) -> str:
    with file.open("rb") as stream, ThreadPoolExecutor(THREADS) as pool:
        starts = range(0, os.fstat(stream.fileno()).st_size, CHUNK)
        return _hash(b"".join(pool.map(lambda start: _hash(os.pread(stream.fileno(), CHUNK, start)), starts))).hex()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SIZE).digest()


def _stamp(file: Path) -> list[int]:
    """What changes with a file's contents. Includes the ctime, since the mtime can be set back."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino]


def _place(file: Path) -> Path:
    """Raises ImportError where there is no cache."""
    return place("digests", {"file": str(file.resolve())})


def _known(file: Path) -> str:
    """A file's cached digest; "" for a file that is new or has changed."""
    try:
        entry = decoded(_place(file).read_bytes())
        return str(entry["digest"]) if entry["stamp"] == _stamp(file) else ""
    except (ImportError, OSError, ValueError, TypeError, KeyError):
        return ""
