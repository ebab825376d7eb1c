"""A quick start: importing torch and transformers makes a million objects, and the collector would walk them all."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from specscope.engine.config import EngineConfig
from specscope.engine.lean import import_transformers

if TYPE_CHECKING:
    from specscope.engine.engine import Engine


# What OpenMP libraries read of how their threads wait: GNU's, and Intel's and LLVM's.
WAITING_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = "1000"  # of GNU's, about 5 us; its own choice is 300,000. `specscope bench waiting` has the figures.


def share_cores() -> None:
    """Let torch's threads sleep soon when they have nothing to do. It must come before torch is imported.

    By default they spin, and beside any other busy process, a screen for one, the thread that spins takes the core from
    the one that it waits for. What the user has set of this stays.
    """
    if not any(name in os.environ for name in WAITING_NAMES):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def start_engine(config: EngineConfig, progress: Callable[[str], None]) -> Engine:
    """Import what an engine needs and build it. Raises UserError.

    The garbage collector rests meanwhile: 0.5 s of a 4 s start.
    """
    progress("starting torch")
    share_cores()
    gc.disable()
    try:
        import_transformers()
        from specscope.engine.engine import Engine

        return Engine(config, progress=progress)
    finally:
        gc.enable()
