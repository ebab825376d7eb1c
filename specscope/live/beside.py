"""A fork of what vLLM runs, in our own engine beside it: the same context, and models that must be the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specscope.debug.commands import WhatIf
from specscope.debug.forked import Forked
from specscope.debug.session import Session
from specscope.engine.config import DRAFTERS, EngineConfig
from specscope.engine.engine import Engine
from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.live.local import EngineWhatIf
from specscope.live.start import start_engine
from specscope.model.places import on_disk
from specscope.speculate.tokens import Tokens
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import RunInfo

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
            self._engine = start_engine(like(self._config, session.history.run), self._progress)
        session.history.vocabulary = self._engine.vocabulary  # the recording has only the tokens that vLLM met
        borrowed = _Borrowed(self._engine, session)
        borrowed.check_model()
        return borrowed.fork(session, words)


def like(config: EngineConfig, run: RunInfo | None) -> EngineConfig:
    """The config of the engine that forks: where neither models nor a drafter are named, with those of the other.

    It measures no costs, for which the other would stand still: its trees are not adaptive, as no other engine's are.
    """
    fixed = replace(config, adaptive=False, costs=None, speculation="on")
    named = config.target, config.draft_model, config.tree
    if any(named) or config.drafter != EngineConfig().drafter or run is None or on_disk(run.target_path) is None:
        return fixed
    drafter = run.drafter if run.drafter in DRAFTERS else "none"
    return replace(
        fixed,
        target=run.target_path,
        drafter=drafter,
        draft_model=run.draft_path or None if drafter != "none" else None,
        tree=run.tree or None if drafter != "none" else None,
        dtype=run.dtype if config.dtype == "auto" else config.dtype,
    )


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
