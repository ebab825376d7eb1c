"""The entry point `sglang.srt.plugins`: called in each of SGLang's processes. Its schedulers' alone are recorded."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from specscope.trace.inside.hooking import ErrorGuard, HookedCall, around, log
from specscope.trace.inside.on_import import at_exit
from specscope.trace.inside.settings import DEBUG, PluginSettings
from specscope.trace.inside.sinks import Outlet

ENGINE = "sglang.srt.entrypoints.engine"
GRACE_SECONDS = 1.0  # for what a scheduler writes within 50 ms, on a busy machine
REGISTRY, CONTEXT = "sglang.srt.plugins.hook_registry", "sglang.srt.runtime_context"


def register() -> None:
    """Do nothing unless a SPECSCOPE_* variable asks for it. Never raises."""
    settings = PluginSettings.read()
    if settings.capture or settings.endpoint:
        guard = ErrorGuard()
        guard.safely(_install, settings, guard)


def _install(settings: PluginSettings, guard: ErrorGuard) -> None:
    from specscope.sglang import hooks as known
    from specscope.trace.inside.recorder import version_of

    registry = importlib.import_module(REGISTRY)
    if ENGINE in sys.modules and settings.capture:
        registry.HookRegistry.register(f"{ENGINE}.Engine.shutdown", around(before_shutdown), registry.HookType.AROUND)
    if known.RESULTS not in sys.modules:
        return  # the frontend, or the detokenizer: nothing is verified here
    if not settings.are_usable(guard):
        return
    if settings.debug:
        log.warning("specscope: %s applies to vLLM only: SGLang cannot be stopped at a decision", DEBUG)
    if importlib.import_module("sglang.srt.speculative.spec_utils").SIMULATE_ACC_LEN > 0:
        guard.step_aside("SGLANG_SIMULATE_ACC_LEN makes up how many drafts are accepted")
        return
    version = version_of("sglang")
    modules = dict(known.imported())
    if line := known.difference(modules.values()):
        guard.step_aside(f"SGLang {version} is unknown to specscope: {line}. `specscope watch` reads its counters")
        return
    hooks: known.ServerHooks = known.ServerHooks(
        modules[known.VERIFY],
        lambda processor, req: open_witness(processor, req, settings, guard, hooks),
        guard,
        full=settings.full,
        records=_records,
    )
    for name in modules:
        for function, hook in hooks.targets()[name].items():
            registry.HookRegistry.register(f"{name}.{function}", around(hook), registry.HookType.AROUND)


def before_shutdown(call: HookedCall) -> Any:
    """Around Engine.shutdown, which kills the schedulers: first they get time to write their captures."""
    time.sleep(GRACE_SECONDS)
    return call()


def _records() -> bool:
    """Whether this rank is the first of those that verify: the last stage's."""
    parallel = importlib.import_module(CONTEXT).get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.pp_rank == parallel.pp_size - 1)


def open_witness(processor: Any, req: Any, settings: PluginSettings, guard: ErrorGuard, hooks: Any) -> Any:
    """The witness of this process, with its sinks."""
    from specscope.sglang.run_info import run_info, settings_of
    from specscope.sglang.witness import ResultWitness
    from specscope.trace.inside.recorder import Recorder

    context = importlib.import_module(CONTEXT)
    speculation = settings_of(context.get_spec(), greedily=(greedily := hooks.greedily()))
    if greedily:
        log.warning("specscope: on this device SGLang decodes greedily at any temperature")
    config = processor.model_config
    run = run_info(context.get_server_args(), config, req, speculation, settings.evidence, settings.privacy)
    rank = int(getattr(context.get_parallel(), "dp_rank", None) or 0)
    outlet = Outlet(settings, run, lambda: req.tokenizer, guard, (rank,))
    made = ResultWitness(Recorder(run, outlet.vocabulary, outlet.publish))

    def close() -> None:
        if hooks.lost:
            log.warning("specscope: %d results were not recorded", hooks.lost)
        outlet.close(copied=made.bytes, steps=made.recorder.steps)

    at_exit(close)
    outlet.announce(f"SGLang {run.versions['sglang']}", run.drafter)
    return made
