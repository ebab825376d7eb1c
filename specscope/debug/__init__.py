"""Run, pause, step, break and go back over anything that steps. Nothing here imports torch.

`Session(engine=...)` is the debugger for a notebook or a test; `Commands(session)` runs the console's commands.
"""

from specscope.debug.answers import Stop, StopReason
from specscope.debug.commands import Commands
from specscope.debug.session import Session

__all__ = ["Commands", "Session", "Stop", "StopReason"]
