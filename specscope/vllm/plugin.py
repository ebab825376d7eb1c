"""The entry point `vllm.general_plugins`: called in each of vLLM's processes before its own modules are imported."""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from specscope.errors import UserError
from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.record.records import StepRecord
from specscope.trace.record.trace_sampling import TraceSampling
from specscope.trace.wire.bus import Bus, Subscription
from specscope.vllm.hooks import log, on_import
from specscope.vllm.scheduling import SchedulerHooks
from specscope.vllm.settings import PluginSettings

if TYPE_CHECKING:
    from specscope.vllm.v1.debugger import Debugger

QUEUED = 4096  # records that may wait to be written; more are lost, and counted


def register() -> None:
    """Do nothing unless a SPECSCOPE_* variable asks for it. Never raises: an error here would end vLLM."""
    settings = PluginSettings.read()
    if not settings.is_on:
        return
    guard = ErrorGuard()
    guard.safely(_install, settings, guard)


def _install(settings: PluginSettings, guard: ErrorGuard) -> None:
    from specscope.vllm import known
    from specscope.vllm.aggregates import offer
    from specscope.vllm.run_info import vllm_version
    from specscope.vllm.v1.runner import RunnerHooks
    from specscope.vllm.v1.sampler import SamplerHooks
    from specscope.vllm.v2.runner import V2Hooks
    from specscope.vllm.v2.scores import DraftLogits

    try:
        settings.sampling()
        settings.level()
    except UserError as error:
        guard.step_aside(str(error))
        return
    version = vllm_version()
    fit = known.Fit((), (), ()) if settings.aggregates else known.here()
    if settings.aggregates or fit.lacking:
        if settings.capture or settings.endpoint:
            offer()
        why = f"vLLM {version} is not as it is known: {fit.lacking}" if fit.lacking else "aggregates were asked for"
        guard.step_aside(f"{why}. Of a server there are aggregates, and no evidence")
        return
    v1, v2 = ErrorGuard(), ErrorGuard()  # what differs in one runner is no matter to the other
    for name, runner_guard, differing in (("V1", v1, fit.v1), ("V2", v2, fit.v2)):
        if differing:
            runner_guard.step_aside(f"the {name} runner of vLLM {version} is not as it is known: {differing[0]}")
    if remark := known.remark(version):
        log.warning("specscope: %s", remark)
    sampler, scheduler = SamplerHooks(v1), SchedulerHooks(guard)

    debugger: Debugger | None = None
    debugging: tuple[Any, ...] = ()
    if settings.debug is not None:
        from specscope.vllm.v1.debugger import Debugger, share

        debugger = Debugger()
        debugging = (debugger, partial(_listen, settings, guard, debugger), share)

    def make(runner: Any) -> Any:
        return witness(runner, settings, guard, scheduler, debugger)

    def make_v2(runner: Any) -> Any:
        if debugger is not None:
            log.warning("specscope: the V2 model runner cannot be debugged: set VLLM_USE_V2_MODEL_RUNNER=0")
        return make(runner)

    runner = RunnerHooks(v1, sampler, make, *debugging)
    second = V2Hooks(v2, make_v2, DraftLogits(v2, wanted=lambda: settings.full and _rank() is not None))
    for name, install, guards in (
        (known.SCHEDULER, scheduler.install, (guard, v1, v2)),
        (known.PLAIN, sampler.install_plain, (v1,)),
        (known.REJECTION, sampler.install, (v1,)),
        (known.RUNNER, runner.install, (v1,)),
        (known.V2_PLAIN, second.install_plain, (v2,)),
        (known.V2_REJECTION, second.install_rejection, (v2,)),
        (known.V2_DRAFTER, second.install_drafter, (v2,)),
        (known.V2_RUNNER, second.install_runner, (v2,)),
    ):
        on_import(name, _checked(install, guards, version))


def _checked(
    install: Callable[[ModuleType], None], guards: tuple[ErrorGuard, ...], version: str
) -> Callable[[ModuleType], None]:
    """Install into a module only where it is as known. `guards`: of every part that depends on it."""
    from specscope.vllm.known import differences

    def check(module: ModuleType) -> None:
        if changes := differences(module):
            for guard in guards:
                guard.step_aside(f"vLLM {version} is not as it is known: {changes[0]}")
        elif not guards[0].is_off:
            install(module)

    return lambda module: guards[0].safely(check, module)


def _rank() -> int | None:
    """This worker's place in its tensor-parallel group; None before the last pipeline stage, which alone samples."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group if get_pp_group().is_last_rank else None


def witness(
    runner: Any,
    settings: PluginSettings,
    guard: ErrorGuard,
    scheduler: SchedulerHooks,
    debugger: Debugger | None = None,
) -> Any:
    """The witness of this worker, with its sinks; None on a rank that records nothing."""
    from specscope.trace.record.vocabulary import Vocabulary
    from specscope.vllm.run_info import run_info
    from specscope.vllm.witness import Witness

    shares_rows = getattr(runner, "batch_sharder", None) is not None  # V2 may have each rank sample its own requests
    rank = _rank()
    if rank is None or (rank and not shares_rows):
        return None
    run = run_info(runner, "full" if settings.full else "lean", settings.privacy)
    if settings.privacy.remark:
        log.warning("specscope: %s", settings.privacy.remark)
    vocabulary = Vocabulary() if settings.privacy else _vocabulary(runner)  # what has no words can tell none
    bus = Bus()
    ranks = (runner.vllm_config.parallel_config.data_parallel_rank, rank)
    closers = sinks(settings, bus, run, vocabulary, ranks)
    losses = Losses(bus)
    publish = losses.publish if debugger is None else _told(losses.publish, run, vocabulary, guard, debugger)
    made = Witness(run, vocabulary, publish, full=settings.full)

    scheduler.resting = made.rest

    def close() -> None:
        guard.safely(scheduler.rest)
        guard.safely(made.rest, None)
        if made.bytes:
            log.warning("specscope: %d bytes copied per step", made.bytes // max(made.steps, 1))
        lost = losses.count
        guard.safely(bus.close)
        for closer in closers:
            guard.safely(closer)
        if lost:
            log.warning("specscope: %d steps or spans were lost", lost)

    atexit.register(close)
    log.warning("specscope: watching vLLM %s (process %d)", run.versions["vllm"], os.getpid())
    return made


class Losses:
    """Publishes records to a bus, and logs losses: the first, and whenever they have doubled.

    As they happen: vLLM may end a worker before it can say anything.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told = 0
        self._told_undecided = 0
        self._broken: list[Subscription] = []

    @property
    def count(self) -> int:
        """Steps that were lost, and spans that were refused."""
        return self._bus.lost + sum(getattr(subscription.sink, "failed", 0) for subscription in self._bus.subscriptions)

    def publish(self, record: StepRecord) -> None:
        """Never waits, and never raises for a sink."""
        self._bus.publish(record)
        lost = self.count
        if lost and lost >= 2 * self._told:
            self._told = lost
            log.warning("specscope: %d steps or spans lost so far: the disk or the network is too slow, or gone", lost)
        undecided = sum(getattr(subscription.sink, "left_out_undecided", 0) for subscription in self._bus.subscriptions)
        if undecided and undecided >= 2 * self._told_undecided:
            self._told_undecided = undecided
            log.warning("specscope: %d requests left out before their end: raise SPECSCOPE_KEEP_BUFFER", undecided)
        for subscription in self._bus.subscriptions:
            if subscription.error is not None and subscription not in self._broken:
                self._broken.append(subscription)
                log.warning("specscope: nothing more is recorded there: %s", subscription.error)


def sinks(settings: PluginSettings, bus: Bus, run: Any, vocabulary: Any, ranks: tuple[int, ...]) -> list[Any]:
    """`ranks`: this worker's; a capture of any but the first has them in its name."""
    from specscope.trace.files import Existing
    from specscope.trace.wire.capture import CaptureWriter
    from specscope.trace.wire.sending.export import SpanSink, make_sender

    closers: list[Any] = []
    sampling = settings.sampling()
    sampled_run = dataclasses.replace(run, sampling=sampling.text)
    if sampling.is_on and settings.endpoint is None and not settings.sample_capture:
        log.warning("specscope: the capture is whole: SPECSCOPE_SAMPLE_CAPTURE=1 leaves requests out of it")
    if settings.capture is not None:
        capture_run, asked = (sampled_run, sampling) if settings.sample_capture else (run, TraceSampling())
        path = _of_ranks(settings.capture, ranks)
        writer = CaptureWriter(path, capture_run, vocabulary, existing=Existing.NEW_NAME, on_full=_warn)
        if writer.renamed:
            _warn(writer.renamed)
        closers += [_subscribed(bus, writer, run, asked), lambda: _warn(*writer.losses())]
    if settings.endpoint is not None:
        sender = make_sender(settings.endpoint, settings.protocol)
        spans = SpanSink(sender, sampled_run, vocabulary, settings.level())
        closers += [_subscribed(bus, spans, run, sampling), lambda: _warn(*spans.losses())]
    return closers


def _warn(*lines: str) -> None:
    for line in lines:
        log.warning("specscope: %s", line)


def _subscribed(bus: Bus, sink: Any, run: Any, sampling: TraceSampling) -> Callable[[], None]:
    """Subscribe a sink, behind trace sampling where that is asked for; what closes it, and says what was kept."""
    from specscope.trace.wire.sampling_sink import SamplingSink

    stage = SamplingSink(sink, run, sampling) if sampling.is_on else sink
    bus.subscribe(stage, limit=QUEUED)

    def close() -> None:
        stage.close()
        if sampling.is_on:
            log.warning("specscope: %s", stage.decisions.text())

    return close


def _of_ranks(path: str, ranks: tuple[int, ...]) -> Path:
    """A file of any rank but the first has its numbers in its name."""
    return Path(path).with_stem("-".join([Path(path).stem, *(str(rank) for rank in ranks if rank)]))


def _told(publish: Any, run: Any, vocabulary: Any, guard: ErrorGuard, debugger: Debugger) -> Any:
    """A function that publishes a record and passes it to the debugger."""
    from specscope.trace.record.privacy import strip

    debugger.history.run, debugger.history.vocabulary = strip(run, run.privacy), vocabulary

    def forward(record: Any) -> None:
        publish(record)
        guard.safely(debugger.finished, strip(record, run.privacy))

    return forward


def _listen(settings: PluginSettings, guard: ErrorGuard, debugger: Debugger, runner: Any) -> None:
    """Open the debugger's socket, on the rank that decides what all of its engine's ranks do."""
    from specscope.remote.debug_server import DebugServer
    from specscope.remote.held import HeldCommands
    from specscope.vllm.run_info import vllm_version
    from specscope.vllm.v1.debugger import limit_of

    if settings.debug is None or _rank() != 0:
        return
    path = _of_ranks(settings.debug, (runner.vllm_config.parallel_config.data_parallel_rank,))
    debugger.limit = limit_of(runner)
    model = runner.vllm_config.model_config.model
    greeting = f"attached to vLLM {vllm_version()}, process {os.getpid()}, {model}: it runs on until it is moved"
    server = DebugServer(path, debugger, lambda: greeting, commands=partial(HeldCommands, debugger))
    atexit.register(lambda: guard.safely(server.close))
    log.warning("specscope: specscope debug --attach %s stops this vLLM at a decision", path)


def _vocabulary(runner: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    from specscope.trace.record.tokens import read_vocabulary
    from specscope.trace.record.vocabulary import Vocabulary

    try:
        return read_vocabulary(cached_tokenizer_from_config(runner.model_config))
    except Exception as error:  # tokens are then shown by number
        log.warning("specscope: cannot read the tokenizer: %r", error)
        return Vocabulary()
