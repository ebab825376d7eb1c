"""A Stop in words."""

from __future__ import annotations

from specscope.debug import show
from specscope.debug.session import Session
from specscope.debug.stops import BreakpointHit, Stop, StopReason
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import printable

NOTHING_LEFT = "nothing is left to run"
AT_THE_END = f"{NOTHING_LEFT} after the last step: run starts again from the first, goto start goes there"


def why_text(stop: Stop) -> str:
    """Why the run stopped; empty where the place itself says it."""
    match stop.reason:
        case StopReason.BREAKPOINT:
            return "\n".join(map(hit_text, stop.hits))
        case StopReason.PHASE:
            return f"{stop.phase or 'nothing'} done, of step {stop.step}"
        case StopReason.UNTIL:
            return f"{stop.condition} holds for {printable(stop.request)}"
        case StopReason.FINISHED:
            return f"{printable(stop.request)} has ended"
        case StopReason.END:
            return NOTHING_LEFT if stop.moved or stop.step < 0 else AT_THE_END
        case StopReason.START:
            return "the first step: no breakpoint before" if stop.step >= 0 else ""
        case StopReason.INTERRUPTED:
            return "interrupted"
        case StopReason.STEP:
            return ""


def hit_text(hit: BreakpointHit) -> str:
    """Which breakpoint, and at what, in a line."""
    node = "" if hit.node is None else f", node {hit.node}"
    return f"breakpoint {hit.number} ({hit.text}) at step {hit.step}, {printable(hit.request)}{node}"


def place_text(stop: Stop, session: Session) -> str:
    """Where the run stopped, as the session stands: its step, request and node; within a step, what there is of it."""
    return show.begun(session) if stop.reason is StopReason.PHASE else show.where(session)


def stop_text(stop: Stop, history: History) -> str:
    """Why and where an engine in another process stopped, by its history here."""
    at = history.position_of(stop.step)
    if at is None:
        return why_text(stop)
    session = Session(history, position=at)
    if stop.hits:
        session.request, session.node = stop.hits[0].request, None
        session.node = stop.hits[0].node
    return "\n".join(text for text in (why_text(stop), show.where(session)) if text)
