"""StatLogger: what vLLM's server calls with its statistics. This module alone needs vLLM to be imported."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.on_import import at_exit
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.inside.sinks import sinks, start_line, warn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.bus import Bus
from specscope.vllm.aggregates import Sums, run_of_sums
from specscope.vllm.run_info import left_out, speculation, vllm_version


class StatLogger(StatLoggerBase):  # type: ignore[misc]
    """One for each engine. An error in it would end the server's output: it is caught, and the logger steps aside."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._guard = ErrorGuard()
        self._sums: Sums | None = None
        self._guard.safely(self._begin, vllm_config, engine_index)

    def _begin(self, config: Any, engine: int) -> None:
        settings = speculation(getattr(config, "speculative_config", None))
        run = run_of_sums(config, vllm_version(), settings)
        bus = Bus()
        front_end = getattr(getattr(config, "parallel_config", None), "_api_process_rank", 0)
        opened = sinks(PluginSettings.read(), bus, run, Vocabulary(), (engine, max(front_end, 0)))
        self._sums = Sums(str(engine), bus.publish, int(settings.get("num_speculative_tokens") or 0))
        closers = (self._sums.end, bus.close, *opened.closers)
        at_exit(lambda: [self._guard.safely(close) for close in closers])
        warn(start_line(f"vLLM {vllm_version()}", run, f"engine {engine}", opened, [*left_out(run), *opened.lacking]))

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """A step's statistics."""
        if self._sums is not None:
            self._guard.safely(self._sums.add, scheduler_stats, iteration_stats)

    def log(self) -> None:
        """vLLM calls this every few seconds, even when nothing runs."""
        if self._sums is not None:
            self._guard.safely(self._sums.end)

    def log_engine_initialized(self) -> None:
        """Nothing to log."""
