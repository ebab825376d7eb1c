"""The entry point `vllm.general_plugins`: called in each of vLLM's processes before its own modules are imported."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specscope.trace.bus import Bus
from specscope.vllm.guard import Guard, log
from specscope.vllm.on_import import on_import
from specscope.vllm.scheduling import SchedulerHooks
from specscope.vllm.settings import Settings

if TYPE_CHECKING:
    from specscope.vllm.debugger import Debugger

QUEUED = 4096  # records that may wait to be written; more are dropped, and counted


def register() -> None:
    """Do nothing unless a SPECSCOPE_* variable asks for it. Never raises: an error here would end vLLM."""
    settings = Settings.read()
    if not settings.is_on:
        return
    guard = Guard()
    guard.safely(_install, settings, guard)


def _install(settings: Settings, guard: Guard) -> None:
    from specscope.vllm.runner import RunnerHooks
    from specscope.vllm.sampler import SamplerHooks

    sampler, scheduler = SamplerHooks(guard), SchedulerHooks(guard)
    if settings.debug is None:
        runner = RunnerHooks(guard, sampler, lambda runner: witness(runner, settings, guard, scheduler))
    else:
        from specscope.vllm.debugger import Debugger, share

        debugger = Debugger()
        runner = RunnerHooks(
            guard,
            sampler,
            lambda runner: witness(runner, settings, guard, scheduler, debugger),
            debugger,
            lambda runner: _listen(runner, settings, guard, debugger),
            share,
        )
    on_import("vllm.v1.core.sched.scheduler", scheduler.install)
    on_import("vllm.v1.sample.sampler", sampler.install_plain)
    on_import("vllm.v1.sample.rejection_sampler", sampler.install)
    on_import("vllm.v1.worker.gpu_model_runner", runner.install)


def _tells() -> bool:
    """Whether this rank tells what all of its engine's ranks do."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0)


def witness(
    runner: Any, settings: Settings, guard: Guard, scheduler: SchedulerHooks, debugger: Debugger | None = None
) -> Any:
    """The witness of this worker, with its sinks; None on a rank that does not tell."""
    from specscope.vllm.run_info import run_info
    from specscope.vllm.witness import Witness

    if not _tells():
        return None
    run = run_info(runner, "full" if settings.full else "lean")
    vocabulary = _vocabulary(runner)
    bus = Bus()
    closers = _sinks(settings, bus, run, vocabulary, runner)
    publish = bus.publish if debugger is None else _told(bus.publish, run, vocabulary, guard, debugger)
    made = Witness(run, vocabulary, publish, full=settings.full)
    scheduler.resting = made.finish

    def close() -> None:
        guard.safely(scheduler.rest)
        guard.safely(made.finish, None)
        dropped = bus.dropped
        guard.safely(bus.close)
        for closer in closers:
            guard.safely(closer)
        if dropped:
            log.warning("specscope: %d steps were not recorded: the disk or the network was too slow", dropped)

    atexit.register(close)
    log.warning("specscope: watching vLLM %s (process %d)", run.versions["vllm"], os.getpid())
    return made


def _sinks(settings: Settings, bus: Bus, run: Any, vocabulary: Any, runner: Any) -> list[Any]:
    from specscope.trace.capture import CaptureWriter
    from specscope.trace.export import SpanSink, make_exporter
    from specscope.trace.spans import SpanLevel

    closers: list[Any] = []
    if settings.capture is not None:
        writer = CaptureWriter(_of_rank(settings.capture, runner), run, vocabulary)
        bus.subscribe(writer, limit=QUEUED)
        closers.append(writer.close)
    if settings.endpoint is not None:
        sink = SpanSink(make_exporter(settings.endpoint, settings.protocol), run, vocabulary, SpanLevel.TREES)
        bus.subscribe(sink, limit=QUEUED)
        closers.append(sink.close)
    return closers


def _of_rank(path: str, runner: Any) -> Path:
    """Each engine of several (data parallel) has a file of its own."""
    rank = runner.vllm_config.parallel_config.data_parallel_rank
    return Path(path).with_stem(f"{Path(path).stem}-{rank}") if rank else Path(path)


def _told(publish: Any, run: Any, vocabulary: Any, guard: Guard, debugger: Debugger) -> Any:
    """Publish a record, and tell the debugger."""
    debugger.history.run, debugger.history.vocabulary = run, vocabulary

    def told(record: Any) -> None:
        publish(record)
        guard.safely(debugger.finished, record)

    return told


def _listen(runner: Any, settings: Settings, guard: Guard, debugger: Debugger | None) -> None:
    """Open the debugger's socket where this rank tells."""
    from specscope.vllm.debug_server import DebugServer
    from specscope.vllm.debugger import limit_of
    from specscope.vllm.run_info import vllm_version

    if debugger is None or settings.debug is None or not _tells():
        return
    path = _of_rank(settings.debug, runner)
    debugger.limit = limit_of(runner)
    model = runner.vllm_config.model_config.model
    greeting = f"attached to vLLM {vllm_version()}, process {os.getpid()}, {model}: it runs on until it is moved"
    server = DebugServer(path, debugger, lambda: greeting)
    atexit.register(lambda: guard.safely(server.close))
    log.warning("specscope: specscope debug --attach %s stops this vLLM at a decision", path)


def _vocabulary(runner: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    from specscope.trace.tokens import read_vocabulary
    from specscope.trace.vocabulary import Vocabulary

    try:
        return read_vocabulary(cached_tokenizer_from_config(runner.model_config))
    except Exception as error:  # tokens are then shown by number
        log.warning("specscope: cannot read the tokenizer: %r", error)
        return Vocabulary()
