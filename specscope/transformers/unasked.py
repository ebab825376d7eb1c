"""`SPECSCOPE_CAPTURE=run.jsonl python script.py`: a script is recorded that knows nothing of specscope.

torch calls `register` at the end of `import torch`: it is an entry point of the group `torch.backends`. So a process
without torch is not touched, and in one with torch nothing is imported unless a variable asks for a recording.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from specscope.transformers import UTILS

if TYPE_CHECKING:
    from specscope.trace.inside.settings import PluginSettings
    from specscope.transformers.recording import Recording

APART = ("vllm", "sglang", "specscope.cli.main")  # they read the same variables, or are no script of a user's


def register() -> None:
    """Do nothing unless a SPECSCOPE_* variable asks for it. Never raises: an error here would end `import torch`."""
    if not any(name.startswith("SPECSCOPE_") for name in os.environ):
        return
    from specscope.trace.inside.hooking import ErrorGuard
    from specscope.trace.inside.on_import import on_import

    guard = ErrorGuard()
    guard.safely(on_import, UTILS, lambda _: guard.safely(_begin))


def _begin() -> None:
    """Record from now to the end of the process, however it ends: Ctrl-C does not cut the capture."""
    from specscope.errors import UserError
    from specscope.interrupt import interruptible
    from specscope.trace.inside.hooking import log
    from specscope.trace.inside.on_import import at_exit
    from specscope.trace.inside.settings import PluginSettings

    settings = PluginSettings.read()
    if not (settings.capture or settings.endpoint) or any(name in sys.modules for name in APART):
        return
    try:
        recording = recording_of(settings)
        recording.__enter__()
    except UserError as error:
        log.warning("specscope: nothing is recorded: %s", error)
        return

    def end() -> None:
        with interruptible():
            recording.__exit__(None, None, None)
        for file in recording.captures:
            log.warning("specscope: captured to %s", file)

    at_exit(end)
    places = ", ".join(filter(None, [settings.capture, settings.endpoint]))
    log.warning("specscope: assisted generation in transformers is recorded to %s", places)


def recording_of(settings: PluginSettings) -> Recording:
    """What the variables ask for. Raises UserError that names the variable."""
    from specscope.trace.files import Existing
    from specscope.transformers.recording import Recording, options_of

    settings.check()
    options = options_of(
        settings.capture,
        settings.endpoint,
        otlp_protocol=settings.protocol,
        level=settings.level(),
        privacy=settings.privacy,
        ratio=settings.ratio(),
        existing=Existing.NEW_NAME,
    )
    return Recording(options, settings.evidence)
