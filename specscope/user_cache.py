"""Small files in the user's cache: what was worked out once on this machine. No torch."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec

from specscope.whole_file import write_whole

LARGEST = 2**20  # bytes of such a file


def _top() -> Path:
    """Raises ImportError without platformdirs, as in vLLM's environment."""
    from platformdirs import user_cache_path

    return user_cache_path("specscope")


def place(folder: str, about: Mapping[str, str]) -> Path:
    """The file for things of this kind; `about` says all that it depends on."""
    name = hashlib.blake2b(msgspec.json.encode(dict(sorted(about.items()))), digest_size=8).hexdigest()
    return _top() / folder / f"{name}.json"


def own_folder(path: Path) -> None:
    """Make a folder in the user's cache where nobody else can put anything, for files that will be run.

    Raises OSError, also where it or a folder above it in the cache is another user's.
    """
    top = _top()
    top.parent.mkdir(parents=True, exist_ok=True)
    for folder in (*(above for above in reversed(path.parents) if above.is_relative_to(top)), path):
        folder.mkdir(mode=0o700, exist_ok=True)
        held = folder.stat()
        if hasattr(os, "getuid") and held.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        if held.st_mode & 0o022:
            folder.chmod(0o700)


def store(path: Path, data: object) -> None:
    """As JSON, whole or not at all. Raises OSError, and UserError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(data))


def processor() -> str:
    """The name of the machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.processor() or platform.machine()
