"""The entry point `vllm.general_plugins`: called in each of vLLM's processes before its own modules are imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from specscope.errors import UserError
from specscope.trace.inside.hooking import ErrorGuard, log
from specscope.trace.inside.on_import import at_exit, on_import
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.inside.sinks import Outlet, of_ranks, start_line, warn
from specscope.vllm.processes import ENDS, engine_number, first_process_tells, give_grace, rank_of_worker
from specscope.vllm.scheduling import SchedulerHooks

if TYPE_CHECKING:
    from specscope.vllm.v1.debugger import Debugger


def register() -> None:
    """Do nothing unless a SPECSCOPE_* variable asks for it. Never raises: an error here would end vLLM."""
    settings = PluginSettings.read()
    if not settings.is_on:
        return
    guard = ErrorGuard()
    with first_process_tells():
        guard.safely(_install, settings, guard)


def _install(settings: PluginSettings, guard: ErrorGuard) -> None:
    from specscope.vllm import known
    from specscope.vllm.run_info import vllm_version
    from specscope.vllm.v1.runner import RunnerHooks
    from specscope.vllm.v1.sampler import SamplerHooks
    from specscope.vllm.v2.runner import V2Hooks
    from specscope.vllm.v2.scores import DraftLogits

    try:
        settings.check()
    except UserError as error:
        guard.step_aside(str(error))
        return
    version = vllm_version()
    on_import(ENDS, partial(guard.safely, give_grace))
    v1, v2 = ErrorGuard(), ErrorGuard()  # what differs in one runner is no matter to the other
    if remark := known.remark(version):
        log.warning("specscope: %s", remark)
    sampler, scheduler = SamplerHooks(v1), SchedulerHooks(guard)

    debugger: Debugger | None = None
    debugging: tuple[Any, ...] = ()
    if settings.debug is not None:
        from specscope.vllm.v1.debugger import Debugger

        debugger = Debugger()
        debugging = (debugger, partial(_listen, settings, guard, debugger))

    make = partial(witness, settings=settings, guard=guard, scheduler=scheduler, debugger=debugger)
    runner = RunnerHooks(v1, sampler, make, *debugging)
    scores = DraftLogits(v2, wanted=lambda: settings.full and rank_of_worker() is not None)
    second = V2Hooks(v2, partial(make, is_v2=True), scores)
    taps: list[Callable[[ModuleType], None]] = []
    if settings.taps is not None:
        from specscope.vllm.taps import VllmTaps

        taps.append(VllmTaps(ErrorGuard(), settings.taps).install)
    more = {known.RUNNER: [runner.install, *taps], known.V2_RUNNER: [second.install, *taps]}
    for targets, guards in (
        (scheduler.targets, (guard, v1, v2)),
        ({**sampler.targets, **runner.targets}, (v1,)),
        (second.targets, (v2,)),
    ):
        for name, hooks in targets.items():
            installs = [partial(known.wrap_known, hooks=hooks), *more.get(name, ())]
            on_import(name, _checked(installs, guards, version))


def _checked(
    installs: Sequence[Callable[[ModuleType], None]], guards: tuple[ErrorGuard, ...], version: str
) -> Callable[[ModuleType], None]:
    """Install into a module only where it is as known. `guards`: of every part that depends on it."""
    from specscope.vllm.known import differences

    def check(module: ModuleType) -> None:
        if changes := differences(module):
            for guard in guards:
                guard.step_aside(
                    f"vLLM {version} is unknown to specscope: {changes[0]}. `specscope watch` reads a server's counters"
                )
        elif not guards[0].is_off:
            for install in installs:
                install(module)

    return lambda module: guards[0].safely(check, module)


def witness(
    runner: Any,
    settings: PluginSettings,
    guard: ErrorGuard,
    scheduler: SchedulerHooks,
    debugger: Debugger | None,
    *,
    is_v2: bool = False,
) -> Any:
    """The witness of this worker, with its sinks; None on a rank that records nothing. Says so in one line."""
    from specscope.trace.inside.recorder import Recorder, vocabulary_of
    from specscope.trace.record.vocabulary import Vocabulary
    from specscope.vllm.run_info import left_out, run_info, vllm_version
    from specscope.vllm.witness import Witness

    shares_rows = getattr(runner, "batch_sharder", None) is not None  # V2 may have each rank sample its own requests
    rank = rank_of_worker()
    if rank is None or (rank and not shares_rows):
        return None
    run = run_info(runner, "full" if settings.full else "lean", settings.privacy)
    lacking = left_out(run)
    vocabulary = Vocabulary()  # what has no words can tell none
    if not settings.privacy:
        from vllm.tokenizers import cached_tokenizer_from_config

        lacks = lambda why: lacking.append(f"tokens' texts ({why})")  # noqa: E731
        vocabulary = vocabulary_of(lambda: cached_tokenizer_from_config(runner.model_config), lacks)
    outlet = Outlet(settings, run, vocabulary, guard, (engine_number(runner), rank))
    lacking += outlet.lacking
    if debugger is not None and debugger.socket is not None:
        outlet.places.append(f"specscope debug {debugger.socket} stops it at a decision")
    elif settings.debug is not None:
        why = "it needs the V1 runner: set VLLM_USE_V2_MODEL_RUNNER=0" if is_v2 else "its socket could not be opened"
        lacking.append(f"the debugger ({why})")
    publish = outlet.publish if debugger is None else _told(outlet.publish, run, vocabulary, guard, debugger)
    made = Witness(Recorder(run, vocabulary, publish), full=settings.full)
    scheduler.resting = made.rest

    def close() -> None:
        guard.safely(scheduler.rest)
        guard.safely(made.rest, None)
        outlet.close(copied=made.bytes, steps=made.recorder.steps)

    at_exit(close)
    warn(start_line(f"vLLM {vllm_version()}", run, f"{'V2' if is_v2 else 'V1'} runner", outlet.places, lacking))
    return made


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
    from specscope.remote.debug_socket import DebugServer
    from specscope.remote.held import HeldCommands
    from specscope.vllm.run_info import vllm_version
    from specscope.vllm.v1.debugger import limit_of

    if settings.debug is None or rank_of_worker() != 0:
        return
    path = of_ranks(settings.debug, (engine_number(runner),))
    debugger.limit = limit_of(runner)
    model = runner.vllm_config.model_config.model
    greeting = f"attached to vLLM {vllm_version()}, process {os.getpid()}, {model}: it keeps running until you stop it"
    commands = partial(HeldCommands, debugger, debugger.limit.describe)
    server = DebugServer(path, debugger.gate, lambda: greeting, commands)
    debugger.socket = path
    at_exit(lambda: guard.safely(server.close))
