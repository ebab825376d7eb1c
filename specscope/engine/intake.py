"""Who comes and goes: an engine's requests, from when they are added until they are retired."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from specscope.engine.build import Parts
from specscope.engine.forms import Forms
from specscope.engine.request import Request
from specscope.engine.scheduler import Scheduler
from specscope.errors import UserError
from specscope.trace.record.records import FinishReason


class Intake:
    """The requests of one engine. `lock` is held over all that a schedule reads and a commit changes."""

    def __init__(self, parts: Parts, scheduler: Scheduler, noted: Callable[..., None]) -> None:
        """`noted` is called with each request that arrives, and with `cancels` for each that is cancelled."""
        self.lock = threading.RLock()
        self.requests: dict[str, Request] = {}  # waiting and running, by id
        self.ended: list[Request] = []  # cancelled or failed between steps; reported by the next one
        self.forms = Forms(parts.vocabulary, parts.runner.loaded.vocab_size, parts.run_info.eos_tokens)
        self._parts, self._scheduler, self._noted = parts, scheduler, noted
        self._names = itertools.count()

    def add(self, request: Request, name: str | None) -> str:
        """Add a request under `name` (None: a new one); it is queued once its grammar is compiled. Raises UserError."""
        with self.lock:  # of two who give the same name at once, one is refused
            if name is not None and self._is_known(name):
                raise UserError(f"a request named {name!r} is already running")
            request.id = self._new_name() if name is None else name
            if self.forms.prepare(request):
                self.arrive(request)
        return request.id

    def arrive(self, request: Request) -> None:
        """Queue a request as it is."""
        self.requests[request.id] = request
        self._scheduler.waiting.append(request)
        self._noted(request)

    def await_forms(self) -> None:
        """Take in the requests whose grammars are compiled; where nothing else is to be done, wait for one."""
        if not (self.requests or self.ended):
            self.forms.wait()
        with self.lock:
            for request in self.forms.compiled():
                self.arrive(request)

    def _is_known(self, name: str) -> bool:
        return name in self.requests or name in self.forms.compiling

    def _new_name(self) -> str:
        return next(name for i in self._names if not self._is_known(name := f"r{i}"))

    def cancel(self, name: str) -> None:
        """End a request now; what it has emitted stays. Unknown or ended ids are ignored. Needs the lock."""
        if name in self.forms.compiling:
            self.arrive(self.forms.compiling.pop(name)[0])
        request = self.requests.get(name)
        if request is not None:
            self._noted(request, cancels=True)
            request.finish = FinishReason.CANCELLED
            self.retire(request)
            self.ended.append(request)

    def retire(self, request: Request) -> None:
        """Give a request's KV back and forget it."""
        self._scheduler.retire(request)
        self._parts.drafter.release(request.id)
        self.requests.pop(request.id, None)
