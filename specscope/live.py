"""`specscope run`: an engine in a worker process, its sinks, and the live screen."""

from __future__ import annotations

from specscope.debug.viewer import Viewer
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec
from specscope.engine.worker import Ready, Worker
from specscope.errors import UserError
from specscope.options import OutputOptions
from specscope.outputs import Outputs
from specscope.trace.params import SamplingParams


def run_live(
    config: EngineConfig,
    specs: list[PromptSpec],
    params: SamplingParams,
    options: OutputOptions,
    *,
    raw: bool,
    paused: bool,
) -> None:
    """Show the screen at once, while the worker loads; return when the user quits. Raises UserError."""
    from specscope.tui.app import run_app

    outputs: list[Outputs] = []

    def open_outputs(ready: Ready) -> None:
        outputs.append(Outputs(options, worker.bus, ready.run, ready.vocabulary, params))

    worker = Worker(config, specs, params, raw=raw, on_ready=open_outputs, paused=paused)
    try:
        run_app(Viewer(control=worker), title="specscope run")
    finally:
        worker.close()
        for output in outputs:
            output.close()
    if worker.error:
        raise UserError(worker.error)
