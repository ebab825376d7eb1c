"""Who comes and goes: an engine's requests, from when they are added until they are retired.

A grammar may take seconds to compile, and a hostile one all that it is given. So a request arrives when its grammar is
there: the engine steps over the others meanwhile. One that cannot be compiled arrives to be refused.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from specscope.engine.build import Parts
from specscope.engine.request import Request
from specscope.engine.scheduler import Scheduler
from specscope.errors import UserError
from specscope.speculate.allowed import Allowed
from specscope.speculate.structured.compiler import Grammars
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason
from specscope.trace.record.vocabulary import Vocabulary


class Forms:
    """The forms of one engine's requests. `compiling`: requests that have not arrived yet, by id."""

    def __init__(self, vocabulary: Vocabulary, size: int, eos: Iterable[int]) -> None:
        """`size`: the width of the logits."""
        self.size, self.eos = size, tuple(eos)
        self.grammars = Grammars(vocabulary, size, self.eos)
        self.compiling: dict[str, tuple[Request, Future[Any]]] = {}

    def check(self, params: SamplingParams) -> None:
        """Check what can be checked without compiling. Raises UserError."""
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            outside = max(tokens, default=0)
            if outside >= self.size:
                raise UserError(f"{name}: token id {outside} is outside the vocabulary (0 to {self.size - 1})")
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)

    def allowed(self, params: SamplingParams) -> Allowed | None:
        """What an output may go on with; None where all may. Compiles where it must. Raises UserError."""
        if not params.limited:
            return None
        form, stops = params.structured_outputs, params.stop_token_ids
        state = None if form is None else self.grammars.state(self.grammars.compile(form), stops)
        if state is not None and not state.row(()).any():
            raise UserError("structured_outputs: the form allows no first token")
        return Allowed(self.size, (*self.eos, *stops), params.min_tokens, state)


class Intake:
    """The requests of one engine. `lock` is held over all that a schedule reads and a commit changes."""

    def __init__(self, parts: Parts, scheduler: Scheduler, noted: Callable[..., None]) -> None:
        """`noted` is called with each request that arrives, and with `cancels` for each that is cancelled."""
        self.lock = threading.RLock()
        self.requests: dict[str, Request] = {}  # waiting and running, by id
        self.ended: list[Request] = []  # cancelled or failed between steps; reported by the next one
        self.forms = Forms(parts.vocabulary, parts.runner.loaded.vocab_size, parts.run_info.eos_tokens)
        self._scheduler, self._noted = scheduler, noted
        self._names = itertools.count()

    def add(self, request: Request) -> str:
        """Add a request under its id ("": a new one); it is queued once its grammar is compiled. Raises UserError."""
        with self.lock:  # of two who give the same name at once, one is refused
            known = self.requests.keys() | self.forms.compiling.keys()
            if request.id in known:
                raise UserError(f"a request named {request.id!r} is already running")
            request.id = request.id or next(name for i in self._names if (name := f"r{i}") not in known)
            form, forms = request.params.structured_outputs, self.forms
            if form is not None and forms.grammars.find(form) is None:
                forms.compiling[request.id] = request, forms.grammars.submit(form)
            else:
                request.allowed = forms.allowed(request.params)
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
            wait([future for _, future in list(self.forms.compiling.values())[:1]])  # the one that was asked for first
        with self.lock:
            for request, future in [each for each in self.forms.compiling.values() if each[1].done()]:
                del self.forms.compiling[request.id]
                try:
                    future.result()
                    request.allowed = self.forms.allowed(request.params)
                except UserError as error:
                    request.refused = str(error)
                self.arrive(request)

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
        self.requests.pop(request.id, None)
