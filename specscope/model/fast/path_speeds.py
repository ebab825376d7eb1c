"""How fast each fast path is on this machine, by rows: measured once and kept in the user's cache.

A file decides, and not the clock at every start, so that runs on one machine compute the same numbers.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from specscope.model.fast.fast_paths import FastPath, usable, versions
from specscope.trace.checked import decoded
from specscope.user_cache import LARGEST, Others, is_good, is_quiet, place, processor, store, usual

FEW, MANY = 1, 16  # rows of plain decoding, and of a batch or a tree
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256)
READ = 64  # rows up to which reading the weights takes most of the time
WIDE, NARROW = 2048, 768  # of the weights that are tried
COPIES = 16  # of them, so that they do not lie in the processor's caches
FEWER = 4  # where arithmetic takes longer than reading
TURNS, SECONDS = 4, 1.5  # of the trial, and after how long there is no further one


@dataclass(frozen=True)
class PathSpeeds:
    """Seconds of a product, by path and rows."""

    about: Mapping[str, str]  # the machine, and what was tried
    quiet: bool  # whether nothing else kept the machine busy
    seconds: Mapping[str, Mapping[int, float]]

    def fastest(self, rows: int, names: Iterable[str]) -> list[str]:
        """The names, fastest first, at this many rows."""
        return sorted(names, key=lambda name: self.seconds.get(name, {}).get(rows, float("inf")))

    def most_rows(self, few: str, others: Collection[str], factor: float = 1.0) -> int:
        """Up to how many rows the one path takes at most `factor` times as long as the fastest of the others.

        The largest number of rows that was measured stands for all above it.
        """
        largest = 0
        for rows in ROWS:
            if others and self.seconds[few][rows] > factor * min(self.seconds[name][rows] for name in others):
                return largest
            largest = rows
        return sys.maxsize


@cache
def _speeds(dtype: torch.dtype, names: tuple[str, ...], threads: int) -> PathSpeeds:
    about = {
        "processor": processor(),
        "threads": str(threads),
        "torch": str(torch.__version__),
        "dtype": str(dtype),
        **versions(dtype),
    }
    file = place("paths", about)
    try:
        if file.stat().st_size <= LARGEST:
            cached = decoded(file.read_bytes(), PathSpeeds)
            whole = all(set(ROWS) <= set(cached.seconds.get(name, {})) for name in names)
            if whole and dict(cached.about) == about and is_good(file, quiet=cached.quiet):
                return cached
    except (OSError, ValueError):
        pass
    if len(names) < 2:  # there is nothing to choose
        return PathSpeeds(about, True, {name: dict.fromkeys(ROWS, 0.0) for name in names})
    others = Others()
    calls = _measure([path for path in usable(dtype) if path.name in names])
    each = (seconds for by_rows in calls.values() for seconds in by_rows.values())
    quiet = is_quiet(each, others.busy(), threads)
    speeds = {name: {rows: usual(seconds) for rows, seconds in by_rows.items()} for name, by_rows in calls.items()}
    measured = PathSpeeds(about, quiet, speeds)
    with contextlib.suppress(OSError):  # then it is measured at every start
        store(file, measured)
    return measured


def path_speeds(dtype: torch.dtype) -> PathSpeeds:
    """The speeds of all paths that can be used for a dtype here."""
    return _speeds(dtype, tuple(sorted(path.name for path in usable(dtype))), torch.get_num_threads())


@torch.inference_mode()
def _measure(paths: list[FastPath]) -> dict[str, dict[int, list[float]]]:
    """Seconds of each call by path and rows; in turn, so that other load on the machine meets all alike."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDE, NARROW, generator=generator).bfloat16().to(paths[0].dtype)
    products = {path.name: [path.lay_out(weight, None) for _ in range(COPIES)] for path in paths}
    seconds: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in products}
    begin = time.monotonic()
    for turn in range(TURNS):
        if turn and time.monotonic() - begin > SECONDS:
            break
        for rows in ROWS:
            x = torch.randn(rows, NARROW, generator=generator).to(weight.dtype)
            for name, each in products.items():
                for product in each[: COPIES if rows <= READ else FEWER]:
                    start = time.perf_counter()
                    product(x)
                    seconds[name][rows].append(time.perf_counter() - start)
    return seconds
