"""A fork of what vLLM runs, in our own engine beside it: the same context, and models that must be the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specscope.debug.commands import WhatIf
from specscope.debug.forked import Forked
from specscope.debug.session import Session
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.live.local import EngineWhatIf
from specscope.live.start import start_engine
from specscope.speculate.tokens import Tokens
from specscope.trace.record.privacy import NO_TOKEN

# How far the two engines may be apart on the target's likeliest token: their kernels and dtypes may differ.
MOST_APART, LEAST_OF_TOP = 0.01, 0.9


class BesideEngine(WhatIf):
    """Loads its engine at the first fork. Its session is over vLLM's recording of one request."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        self._config, self._progress = config, progress
        self._engine: Engine | None = None

    def fork(self, session: Session, words: Sequence[str]) -> Forked:
        """Run the request from its last step on, with the changes and without. Raises UserError."""
        if self._engine is None:
            self._engine = start_engine(self._config, self._progress)
        session.history.vocabulary = self._engine.vocabulary  # the recording has only the tokens that vLLM met
        borrowed = _Borrowed(self._engine, session)
        borrowed.check_model()
        return borrowed.fork(session, words)


class _Borrowed(EngineWhatIf):
    """Forks and views over an engine that has never run the request."""

    def __init__(self, engine: Engine, session: Session) -> None:
        super().__init__(engine)
        self._session = session

    def check_model(self) -> None:
        """Compute vLLM's step again. Raises UserError where p is another, or the context is only partly known."""
        part = self._session.part
        if part is None or part.verdict is None or not len(part.tree):
            return
        raw, notes = self.view(self._session, 0).raw, part.parents
        if notes is None or not notes.top.size:
            return
        token, theirs = int(notes.top[0, 0]), float(notes.top_p[0, 0])
        ours = next((other.prob for other in raw.top if other.token == token), 0.0)
        if abs(ours - theirs) > MOST_APART * (1 + theirs) or ours < LEAST_OF_TOP * raw.top[0].prob:
            raise UserError(
                f"our engine gives vLLM's likeliest token p {ours:.4f}, and vLLM gave {theirs:.4f}: the models are not "
                "the same. Give vLLM's with --target"
            )

    def _request(self, name: str) -> Request:
        history = self._session.history.requests[name]
        info, part = history.info, history.steps[-1]
        count = part.context_len + part.prefill_tokens + 1
        known = history.before(len(history.steps) - 1, count)
        if info is None or len(known) < count:
            raise UserError(f"only a part of the context of {name} is known: it cannot be run again")
        if NO_TOKEN in known or info.params.left_out:
            raise UserError(f"token ids or parameters of {name} are left out: it cannot be run again")
        prompt = info.prompt_tokens.tolist()
        request = Request(name, info.prompt, prompt, info.params, info.labels, info.arrival_ns, title=info.title)
        request.tokens = Tokens(prompt, known[len(prompt) :])
        return request
