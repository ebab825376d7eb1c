"""The debugger's commands inside vLLM: those that it cannot obey say why, and every stop says how long vLLM waits."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.debug.answers import Answer
from specscope.debug.commands import Commands, WhatIf
from specscope.debug.forked import Forked
from specscope.debug.kv_check import KVCheck
from specscope.debug.session import Session
from specscope.debug.views import NodeView
from specscope.errors import UserError
from specscope.vllm.debugger import Debugger
from specscope.vllm.session import VllmSession

NO_FORK = "vLLM cannot run a request twice: specscope debug --attach SOCKET forks it in an engine of its own"


class _VllmWhatIf(WhatIf):
    """What vLLM can show and change where it stands."""

    def __init__(self, debugger: Debugger) -> None:
        self.debugger = debugger

    def fork(self, session: Session, words: Sequence[str]) -> Forked:
        """It has one KV cache for each request, and one place in it."""
        raise UserError(NO_FORK)

    def check_kv(self, session: Session) -> KVCheck:
        """Its cache is not ours to read."""
        raise UserError("vLLM's KV cache cannot be checked from here: specscope audit checks what it computed from it")

    def view(self, session: Session, node: int | None) -> NodeView:
        """The tensors of the sampler's call, while it stands."""
        part = session.part
        if part is None or node is None:
            raise UserError("give a drafted node, such as node 0")
        return self.debugger.view(part, node)

    def force(self, session: Session, words: Sequence[str]) -> None:
        """Another outcome; the session stays at the node where it was."""
        part, node = session.part, session.node
        if part is None:
            raise UserError("nothing has run yet")
        self.debugger.force(part, words)
        session.node = node


class VllmCommands(Commands):
    """A debugger's lines, for one client."""

    def __init__(self, debugger: Debugger) -> None:
        super().__init__(VllmSession(debugger.gate, debugger.history), _VllmWhatIf(debugger))
        self.debugger = debugger

    def answer(self, line: str) -> Answer:
        """With what became of vLLM since the last line, and how long it waits now."""
        gate = self.debugger.gate
        gate.interrupted, expired, gate.expired = False, gate.expired, None
        answer = super().answer(line)
        text = [f"vLLM went on by itself after {expired:g} s: pause stops it again"] if expired is not None else []
        text += [answer.text] if answer.text else []
        if answer.stop is not None:
            text.append(self.debugger.limit.describe() if gate.stands else "vLLM runs, and stops at its next step")
        return Answer(answer.line, "\n".join(text), answer.stop)

    def do_step(self, text: str) -> str:
        """It has no phases to stop between."""
        return self.stopped(self.session.step())
