"""Small files in the user's cache: what was measured once on this machine. No torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median, quantiles

import msgspec
from platformdirs import user_cache_path

LARGEST = 2**20  # bytes of such a file
BUSY = 1.3  # times its lower quartile, a median that other load must have raised
SPARE = 0.2  # processors that others may use meanwhile
SOON = 600  # seconds after which figures of a busy machine are taken again


def place(folder: str, about: Mapping[str, str]) -> Path:
    """The file for things of this kind; `about` says all that it depends on."""
    name = hashlib.blake2b(msgspec.json.encode(dict(sorted(about.items()))), digest_size=8).hexdigest()
    return user_cache_path("specscope") / folder / f"{name}.json"


def own_folder(path: Path) -> None:
    """Make a folder in the user's cache where nobody else can put anything, for files that will be run.

    Raises OSError, also where it or a folder above it in the cache is another user's.
    """
    top = user_cache_path("specscope")
    top.parent.mkdir(parents=True, exist_ok=True)
    for folder in (*(above for above in reversed(path.parents) if above.is_relative_to(top)), path):
        folder.mkdir(mode=0o700, exist_ok=True)
        held = folder.stat()
        if hasattr(os, "getuid") and held.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        if held.st_mode & 0o022:
            folder.chmod(0o700)


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


def usual(seconds: list[float]) -> float:
    """The lower quartile: what it takes where nothing else runs meanwhile."""
    return round(quantiles(seconds, n=4)[0], 8)


class Others:
    """How many processors other processes keep busy, from when it is made on."""

    def __init__(self, *, with_parent: bool = True) -> None:
        """`with_parent`: whether the process that started this one is one of them."""
        self._with_parent = with_parent
        self._began, self._before = time.monotonic(), self._seconds()

    def busy(self) -> float:
        """Processors, on average. What a host takes from a virtual machine counts too."""
        return max(self._seconds() - self._before, 0.0) / max(time.monotonic() - self._began, 1e-6)

    def _seconds(self) -> float:
        """Seconds of all processors that went to others than this process and to nobody."""
        import psutil

        now = psutil.cpu_times()._asdict()
        names = "user", "nice", "system", "irq", "softirq", "steal"  # user has guests
        used = sum(now.get(name, 0.0) for name in names) - sum(os.times()[:2])
        if not self._with_parent:
            with contextlib.suppress(psutil.Error):
                used -= sum(psutil.Process(os.getppid()).cpu_times()[:2])
        return float(used)


def is_quiet(each: Iterable[list[float]], others: float, threads: int) -> bool:
    """Whether nothing else kept the machine busy while so many threads were timed.

    `others`: processors that other processes had: they slow all calls alike, so the calls do not show it. Else half of
    the calls took about what the faster ones did.
    """
    if others > max((os.cpu_count() or 1) - threads, SPARE):
        return False
    return median(median(seconds) / quantiles(seconds, n=4)[0] for seconds in each) < BUSY
