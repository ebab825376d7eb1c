"""A quick start: importing torch and transformers makes a million objects, and the collector would walk them all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from specscope.engine.config import EngineConfig
from specscope.engine.lean import import_transformers

if TYPE_CHECKING:
    from specscope.engine.engine import Engine


def start_engine(config: EngineConfig, progress: Callable[[str], None]) -> Engine:
    """Import what an engine needs and build it. Raises UserError.

    The garbage collector rests meanwhile: 0.5 s of a 4 s start.
    """
    progress("starting torch")
    gc.disable()
    try:
        import_transformers()
        from specscope.engine.engine import Engine

        return Engine(config, progress=progress)
    finally:
        gc.enable()
