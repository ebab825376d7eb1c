"""The live screen: `specscope run`, over an engine in a worker process and its sinks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from specscope.cli.capture import summary, tell_failed
from specscope.cli.streams import say, warn
from specscope.debug.answers import Notice
from specscope.debug.viewer import Viewer
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, interruptible
from specscope.lifetime import Lifetime
from specscope.live.client import Worker
from specscope.live.messages import Ready
from specscope.trace.history.loops import loop_share
from specscope.trace.history.totals import count_undrafted
from specscope.trace.record.params import SamplingParams
from specscope.trace.wire.outputs import OutputOptions, Outputs


def run_live(
    config: EngineConfig,
    specs: list[PromptSpec],
    params: SamplingParams,
    options: OutputOptions,
    lifetime: Lifetime,
    *,
    how: Mapping[str, Any],
    paused: bool,
) -> int:
    """Show the screen at once, while the worker loads; return when the user quits.

    The exit code is 1 where a request failed or the capture lacks something.

    `how`: how prompts that are typed there become text. However it ends, running requests end as cancelled and the
    capture is complete. Raises UserError.
    """
    outputs: list[Outputs] = []
    losses: list[str] = []

    def open_outputs(ready: Ready) -> None:
        outputs.append(Outputs(options, worker.bus, ready.run, ready.vocabulary, params, tell=notify))

    def notify(line: str) -> None:
        worker.news.append(Notice(line))

    with ends_at_once():
        from specscope.tui.app import run_app

        worker = Worker(config, specs, params, **how, on_ready=open_outputs, paused=paused)
    viewer, ending = Viewer(control=worker), threading.Lock()

    def finish() -> None:
        # When the screen closes or the terminal is lost. Further signals must not cut it short.
        with interruptible(), ending:
            worker.close()
            for opened in outputs:
                losses[:] = opened.close()

    lifetime.leave = finish
    try:
        run_app(viewer, lifetime, title="specscope run")
    finally:
        finish()
    for line in losses:
        warn(line)
    if worker.error:
        raise UserError(worker.error)
    if (history := viewer.history).steps:
        looped = loop_share([end.output for record in history.steps for end in record.finished])
        told = summary(history.acceptance, count_undrafted(history.run, history.steps), looped)
        kept = f"captured {told} → {outputs[0].captured}"
        say(kept if outputs[0].captured else f"decoded {told}; not saved (-o run.jsonl saves a run)")
    return int(tell_failed(history) or any(opened.code for opened in outputs))
