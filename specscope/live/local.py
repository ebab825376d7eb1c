"""A debugger's session over an engine in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from specscope.debug.breakpoints import Breakpoints
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.engine.prompts import PromptSpec
from specscope.interrupt import ends_at_once
from specscope.live.start import start_engine
from specscope.live.whatif import EngineWhatIf
from specscope.trace.history.history import History


def session_over(engine: Engine, breakpoints: Breakpoints | None = None) -> Session:
    """A session that runs `engine`, which must not have run yet where going back to its start is wanted."""
    return Session(History(run=engine.run_info, vocabulary=engine.vocabulary), engine, breakpoints)


def commands_over(engine: Engine) -> Commands:
    """The same, spoken to in lines, with forks and distributions."""
    return Commands(session_over(engine), EngineWhatIf(engine))


def live_commands(
    config: EngineConfig,
    specs: Sequence[PromptSpec],
    progress: Callable[[str], None] = lambda stage: print(f"{stage} ...", file=sys.stderr),
) -> Commands:
    """Load an engine, give it prompts, and stand before its first step. Raises UserError."""
    with ends_at_once():
        engine = start_engine(config, progress)
    commands = commands_over(engine)
    for spec in specs:
        engine.add_spec(spec)
    return commands
