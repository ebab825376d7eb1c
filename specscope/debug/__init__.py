"""Run, pause, step, break and go back over anything that steps. Nothing here imports torch.

`Session(engine=...)` is the debugger for a notebook or a test; `Commands(session)` runs the console's commands.
"""

from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.debug.stops import Stop, StopReason

__all__ = ["Commands", "Session", "Stop", "StopReason"]
