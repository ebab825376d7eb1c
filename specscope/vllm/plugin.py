"""The entry point `vllm.general_plugins`: called in each of vLLM's processes before its own modules are imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from specscope.trace.inside.hooking import ErrorGuard, log
from specscope.trace.inside.on_import import at_exit, on_import
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.inside.sinks import Outlet
from specscope.vllm import known
from specscope.vllm.scheduling import SchedulerHooks

if TYPE_CHECKING:
    from specscope.trace.inside.recorder import Publish
    from specscope.vllm.v1.debugger import Debugger


def register() -> None:
    """Do nothing unless a SPECSCOPE_* variable asks for it. Never raises: an error here would end vLLM."""
    settings = PluginSettings.read()
    if not settings.is_on:
        return
    guard = ErrorGuard()
    guard.safely(_install, settings, guard)


def _install(settings: PluginSettings, guard: ErrorGuard) -> None:
    from specscope.vllm.run_info import vllm_version
    from specscope.vllm.v1.runner import RunnerHooks
    from specscope.vllm.v2.rows import DraftLogits
    from specscope.vllm.v2.runner import V2Hooks

    if not settings.are_usable(guard):
        return
    on_import(known.ENDS, partial(guard.safely, known.give_grace))
    if remark := known.remark(vllm_version()):
        log.warning("specscope: %s", remark)
    v1, v2 = ErrorGuard(), ErrorGuard()  # what differs in one runner is no matter to the other
    scheduler, debugger = SchedulerHooks(guard), None
    if settings.debug is not None:
        from specscope.vllm.v1 import debugger as debugging

        debugger = debugging.Debugger()
        debugger.asked = settings.debug
    make = partial(witness, settings=settings, guard=guard, scheduler=scheduler)
    runner = RunnerHooks(v1, partial(make, debugger=debugger), debugger)
    scores = DraftLogits(v2, wanted=lambda: settings.full and known.rank_of_worker() is not None)
    second = V2Hooks(v2, partial(make, is_v2=True), scores)
    runners: dict[str, RunnerHooks | V2Hooks] = {known.RUNNER: runner, known.V2_RUNNER: second}
    taps: list[Callable[[ModuleType], None]] = []
    if settings.taps is not None:
        from specscope.vllm.taps import VllmTaps

        taps.append(VllmTaps(ErrorGuard(), settings.taps).install)
    more = {name: [partial(known.wrap_loaded, own.made), *taps] for name, own in runners.items()}
    if debugger is not None:
        more[known.RUNNER].append(partial(known.wrap_loaded, partial(v1.safely, debugger.listen), name="__init__"))
    for targets, guards in ((scheduler.targets, (guard, v1, v2)), (runner.targets, (v1,)), (second.targets, (v2,))):
        for name, hooks in targets.items():
            installs = [partial(known.wrap_known, hooks=hooks), *more.get(name, ())]
            on_import(name, partial(guards[0].safely, checked, installs, guards))


def checked(
    installs: Sequence[Callable[[ModuleType], None]], guards: tuple[ErrorGuard, ...], module: ModuleType
) -> None:
    """Install into a module only where it is as known. `guards`: of every part that depends on it."""
    from specscope.vllm.run_info import vllm_version

    if changes := known.differences(module):
        why = (
            f"vLLM {vllm_version()} is unknown to specscope: {changes[0]}. `specscope watch` reads a server's counters"
        )
        for guard in guards:
            guard.step_aside(why)
        return
    for install in installs:
        install(module)


def witness(
    runner: Any,
    settings: PluginSettings,
    guard: ErrorGuard,
    scheduler: SchedulerHooks,
    debugger: Debugger | None = None,
    *,
    is_v2: bool = False,
) -> Any:
    """The witness of this worker, with its sinks; None on a rank that records nothing. Says so in one line."""
    from specscope.trace.inside.recorder import Recorder
    from specscope.vllm.run_info import run_info, vllm_version
    from specscope.vllm.witness import Witness

    shares_rows = getattr(runner, "batch_sharder", None) is not None  # V2 may have each rank sample its own requests
    rank = known.rank_of_worker()
    if rank is None or (rank and not shares_rows):
        return None
    run = run_info(runner, settings.evidence, settings.privacy)
    tokenizer = lambda: import_module("vllm.tokenizers").cached_tokenizer_from_config(runner.model_config)  # noqa: E731
    outlet = Outlet(settings, run, tokenizer, guard, (known.engine_number(runner), rank))
    publish: Publish = outlet.publish
    if debugger is not None:
        publish = debugger.told(publish, run, outlet.vocabulary, guard)
    if debugger is not None and debugger.socket is not None:
        outlet.places.append(f"specscope debug {debugger.socket} stops it at a decision")
    elif settings.debug is not None:
        why = "it needs the V1 runner: set VLLM_USE_V2_MODEL_RUNNER=0" if is_v2 else "its socket could not be opened"
        outlet.lacking.append(f"the debugger ({why})")
    made = Witness(Recorder(run, outlet.vocabulary, publish), full=settings.full)
    scheduler.resting = made.rest

    def close() -> None:
        guard.safely(scheduler.rest)
        guard.safely(made.rest, None)
        outlet.close(copied=made.bytes, steps=made.recorder.steps)

    at_exit(close)
    outlet.announce(f"vLLM {vllm_version()}", f"{'V2' if is_v2 else 'V1'} runner")
    return made
