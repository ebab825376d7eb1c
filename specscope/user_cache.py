"""Small files in the user's cache: what was measured once on this machine. No torch."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

LARGEST = 2**20  # bytes of such a file
SOON = 3600  # seconds after which figures of a busy machine are taken again


def place(folder: str, about: Mapping[str, str]) -> Path:
    """The file for things of this kind; `about` says all that it depends on."""
    name = hashlib.blake2b(msgspec.json.encode(dict(sorted(about.items()))), digest_size=8).hexdigest()
    return user_cache_path("specscope") / folder / f"{name}.json"


def store(path: Path, data: object, *, make_folder: bool = True) -> None:
    """As JSON, whole or not at all. Raises OSError."""
    if make_folder:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(text)
    os.replace(part.name, path)


def is_good(path: Path, *, quiet: bool) -> bool:
    """Whether figures need not be measured again: they were taken on a quiet machine, or not long ago."""
    return quiet or time.time() - path.stat().st_mtime < SOON


def processor() -> str:
    """The name of the machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.processor() or platform.machine()
