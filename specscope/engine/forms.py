"""What the outputs of an engine's requests may be; and who waits until its grammar is compiled.

A grammar may take seconds to compile, and a hostile one all that it is given. So a request arrives when its grammar is
there: the engine steps over the others meanwhile. One that cannot be compiled arrives to be refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.speculate.allowed import Allowed
from specscope.speculate.structured.compiler import Grammars
from specscope.trace.record.params import SamplingParams
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
        form = params.structured_outputs
        return self._allowed(params, None if form is None else self.grammars.compile(form))

    def _allowed(self, params: SamplingParams, grammar: Any | None) -> Allowed | None:  # noqa: ANN401
        if not params.limited:
            return None
        stops = params.stop_token_ids
        state = None if grammar is None else self.grammars.state(grammar, stops)
        if state is not None and not state.row(()).any():
            raise UserError("structured_outputs: the form allows no first token")
        return Allowed(self.size, (*self.eos, *stops), params.min_tokens, state)

    def prepare(self, request: Request) -> bool:
        """Whether a request may arrive now; if not, it arrives when its grammar is compiled. Raises UserError."""
        form = request.params.structured_outputs
        grammar = None if form is None else self.grammars.find(form)
        if form is not None and grammar is None:
            self.compiling[request.id] = request, self.grammars.submit(form)
            return False
        request.allowed = self._allowed(request.params, grammar)
        return True

    def wait(self) -> None:
        """Wait for the grammar that was asked for first, where there is one."""
        for _, future in list(self.compiling.values())[:1]:
            wait([future])

    def compiled(self) -> list[Request]:
        """The requests whose grammars are compiled, or failed to compile."""
        ready = [request for request, future in self.compiling.values() if future.done()]
        for request in ready:
            future = self.compiling.pop(request.id)[1]
            try:
                request.allowed = self._allowed(request.params, future.result())
            except UserError as error:
                request.refused = str(error)
        return ready
