"""The scheduler's side: what only EngineCore knows of a request, put onto each step's SchedulerOutput.

A worker may be another process. It gets the scheduler's output pickled, and a further attribute travels with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

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
    """One for a process; of each of its schedulers it keeps what happened since its last step."""

    def __init__(self, guard: ErrorGuard) -> None:
        self._guard = guard
        self.resting: Callable[[SchedulerNotes], None] | None = None  # where a worker in this process is told at once
        self._notes: WeakKeyDictionary[Any, SchedulerNotes] = WeakKeyDictionary()

    @property
    def targets(self) -> Mapping[str, Hooks]:
        """What goes around which function, by module."""
        notes: Mapping[str, Callable[[SchedulerNotes, Any], None]] = {
            "add_request": _arrives,
            "_preempt_request": lambda notes, request: notes.preempted.append(request.request_id),
            "_free_request": _ends,
        }
        hooks = {f"Scheduler.{name}": partial(self._before, note) for name, note in notes.items()}
        rest = {"Scheduler.schedule": self._schedule, "Scheduler.update_from_output": self._update}
        return {SCHEDULER: hooks | rest}

    def _before(self, note: Callable[[SchedulerNotes, Any], None], call: HookedCall) -> Any:
        """Note a request of a scheduler, then go on."""
        self._guard.safely(lambda: note(self._of(call.given["self"]), call.given["request"]))
        return call()

    def _of(self, scheduler: Any) -> SchedulerNotes:
        return self._notes.setdefault(scheduler, SchedulerNotes())

    def _schedule(self, call: HookedCall) -> Any:
        began, output = time.time_ns(), call()
        self._guard.safely(self._attach, call.args[0], output, began)
        return output

    def _update(self, call: HookedCall) -> Any:
        """Offline, no further step comes when the last request has ended."""
        outputs = call()
        if not call.args[0].get_num_unfinished_requests():
            self._guard.safely(self.rest)
        return outputs

    def rest(self) -> None:
        """Hand the worker in this process the notes that no further step may come to bring."""
        if self.resting is None:
            return
        for scheduler, notes in list(self._notes.items()):
            self._notes[scheduler] = SchedulerNotes(arrived=notes.arrived)
            self.resting(notes)

    def _attach(self, scheduler: Any, output: Any, began: int) -> None:
        notes, pool = self._of(scheduler), scheduler.kv_cache_manager.block_pool
        notes.schedule_ns = (began, time.time_ns())
        notes.running, notes.waiting = len(scheduler.running), len(scheduler.waiting)
        notes.blocks_free = pool.get_num_free_blocks()
        notes.blocks_used = pool.num_gpu_blocks - 1 - notes.blocks_free  # one block is vLLM's null block
        setattr(output, ATTRIBUTE, notes)
        self._notes[scheduler] = SchedulerNotes()


def _arrives(notes: SchedulerNotes, request: Any) -> None:
    notes.arrived[request.request_id] = Arrival(int(request.arrival_time * 1e9), dict(request.trace_headers or {}))


def _ends(notes: SchedulerNotes, request: Any) -> None:
    notes.ended.append(
        Ended(
            request.request_id,
            time.time_ns(),
            reason=str(request.get_finished_reason()),
            stop="" if request.stop_reason is None else str(request.stop_reason),
            output=list(request.output_token_ids),
        )
    )
