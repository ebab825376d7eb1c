"""The scheduler's side: what only EngineCore knows of a request, put onto each step's SchedulerOutput.

A worker may be another process. It gets the scheduler's output pickled, and a further attribute travels with it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specscope.trace.inside.hooking import ErrorGuard, HookedCall
from specscope.vllm.known import SCHEDULER, Hooks

ATTRIBUTE = "specscope_notes"


@dataclass
class Arrival:
    """A request as EngineCore got it."""

    arrival_ns: int  # wall clock
    trace_headers: Mapping[str, str]  # the trace context that the client sent; empty where it sent none


@dataclass
class Ended:
    """A request's end. `output` is what vLLM gave back: after EOS, stop tokens and length."""

    request: str
    finished_ns: int
    reason: str  # stop, length, abort, error, repetition
    stop: str  # the stop token that ended it, "" otherwise
    output: list[int]
    prompt: list[int]
    params: Any  # vLLM's SamplingParams


@dataclass
class SchedulerNotes:
    """What happened since the last step was scheduled, and the present state."""

    arrived: dict[str, Arrival] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_free: int = 0
    schedule_ns: tuple[int, int] = (0, 0)  # when scheduling began and ended


class SchedulerHooks:
    """Wraps a Scheduler class. One for a process; each scheduler keeps its own notes."""

    def __init__(self, guard: ErrorGuard) -> None:
        self._guard = guard
        self.resting: Callable[[SchedulerNotes], None] | None = None  # where a worker in this process is told at once
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def targets(self) -> Mapping[str, Hooks]:
        """What goes around which function, by module."""
        return {
            SCHEDULER: {
                "Scheduler.add_request": self._before(self._arrives),
                "Scheduler._preempt_request": self._before(
                    lambda scheduler, request: _notes(scheduler).preempted.append(request.request_id)
                ),
                "Scheduler._free_request": self._before(self._ends),
                "Scheduler.schedule": self._schedule,
                "Scheduler.update_from_output": self._update,
            }
        }

    def _before(self, note: Callable[[Any, Any], None]) -> Callable[[HookedCall], Any]:
        """Note a request of a scheduler, then go on."""

        def hook(call: HookedCall) -> Any:
            self._guard.safely(lambda: note(call.given["self"], call.given["request"]))
            return call()

        return hook

    def _schedule(self, call: HookedCall) -> Any:
        began, output = time.time_ns(), call()
        self._guard.safely(self._attach, call.args[0], output, began)
        return output

    def _update(self, call: HookedCall) -> Any:
        """Offline, no further step comes when the last request has ended."""
        outputs = call()
        if self.resting is not None and not call.args[0].get_num_unfinished_requests():
            self._guard.safely(self.rest)
        return outputs

    def rest(self) -> None:
        """Hand the worker in this process the notes that no further step may come to bring."""
        for scheduler in self._schedulers:
            notes = _notes(scheduler)
            scheduler.__dict__[ATTRIBUTE] = SchedulerNotes(arrived=notes.arrived)
            if self.resting is not None:
                self.resting(notes)

    def _arrives(self, scheduler: Any, request: Any) -> None:
        self._schedulers.add(scheduler)
        headers = request.trace_headers or {}
        _notes(scheduler).arrived[request.request_id] = Arrival(int(request.arrival_time * 1e9), dict(headers))

    def _ends(self, scheduler: Any, request: Any) -> None:
        stop = "" if request.stop_reason is None else str(request.stop_reason)
        ended = Ended(
            request=request.request_id,
            finished_ns=time.time_ns(),
            reason=str(request.get_finished_reason()),
            stop=stop,
            output=list(request.output_token_ids),
            prompt=list(request.prompt_token_ids or ()),
            params=request.sampling_params,
        )
        _notes(scheduler).ended.append(ended)

    def _attach(self, scheduler: Any, output: Any, began: int) -> None:
        notes = _notes(scheduler)
        notes.schedule_ns = (began, time.time_ns())
        notes.running, notes.waiting = len(scheduler.running), len(scheduler.waiting)
        pool = scheduler.kv_cache_manager.block_pool
        notes.blocks_free = pool.get_num_free_blocks()
        notes.blocks_used = pool.num_gpu_blocks - 1 - notes.blocks_free  # one block is vLLM's null block
        setattr(output, ATTRIBUTE, notes)
        scheduler.__dict__[ATTRIBUTE] = SchedulerNotes()


def _notes(scheduler: Any) -> SchedulerNotes:
    """What this scheduler has noted since its last step."""
    notes: SchedulerNotes = scheduler.__dict__.setdefault(ATTRIBUTE, SchedulerNotes())
    return notes
