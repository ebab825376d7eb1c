"""Runs compiled functions on the threads that torch computes with: there is one pool of them, and they wait for work.

A second pool, such as Numba's own, would take the processors from torch's threads, which spin while they wait. torch's
library for OpenMP is asked by its C interface (GOMP_parallel, which LLVM's library has too); where it has none, the
kernels cannot be used.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import binding
from numba import types
from platformdirs import user_cache_path

from specscope.user_cache import own_folder

NEEDED = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")  # by compiled functions

me = types.ExternalFunction("omp_get_thread_num", types.int32())
members = types.ExternalFunction("omp_get_num_threads", types.int32())
barrier = types.ExternalFunction("GOMP_barrier", types.void())


@cache
def _library() -> ctypes.CDLL:
    """The OpenMP library that torch has loaded. Raises OSError or AttributeError where it is not of this kind."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    libraries = [path for path in sorted(paths) if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    own = Path(torch.__file__).resolve().parent
    beside = [path for path in libraries if {own, own.parent / "torch.libs"} & {*Path(path).resolve().parents}]
    if not libraries:
        raise OSError("torch's threads are not OpenMP's")
    library = ctypes.CDLL((beside or libraries)[0])
    for name in NEEDED:
        binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


@cache
def compiled(work: Callable[[int], None]) -> Callable[..., None]:
    """`work`, compiled; it is called with the address of its arguments on every thread of a team.

    Calling what is returned with whole numbers runs it; with `alone=True` on the caller's thread, where the others
    would take longer to begin than the work takes.
    """
    run, address = _library().GOMP_parallel, machine_code(work, 1).address

    def call(*numbers: int, alone: bool = False) -> None:
        arguments = (ctypes.c_int64 * len(numbers))(*numbers)
        run(address, ctypes.addressof(arguments), 1 if alone else torch.get_num_threads(), 0)

    return call


def machine_code(function: Callable[..., None], arguments: int) -> Any:
    """A function of so many int64, compiled; its `address` is a C function's.

    The machine code is kept in the user's cache, in a folder for this version of the sources: Numba looks at the file
    of a function alone, not at those that it calls.
    """
    kind = types.void(*[types.int64] * arguments)
    folder = _cache()
    try:
        own_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # else Numba would look for another place, where an older version's may lie, or another user's
        return numba.cfunc(kind, error_model="numpy")(function)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        return numba.cfunc(kind, cache=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


def must_compile() -> bool:
    """Whether the kernels can be used here, and no machine code was kept by an earlier start or by this one."""
    try:
        _library()
    except (OSError, AttributeError):
        return False
    return not any(_cache().glob("*/*.nbc"))


@cache
def version() -> str:
    """The version of the kernels, which follows from their sources."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _cache() -> Path:
    return user_cache_path("specscope") / "kernels" / version()
