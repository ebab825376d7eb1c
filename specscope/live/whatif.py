"""The commands that need an engine in this process: a node's distributions, and forks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specscope.debug.commands import WhatIf
from specscope.debug.forked import Forked
from specscope.debug.session import Session
from specscope.engine.engine import Engine
from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.live.fork import fork
from specscope.live.inspect import describe, look
from specscope.trace.changes import Changes
from specscope.trace.checked import short, whole
from specscope.trace.params import SamplingParams
from specscope.trace.records import RequestStep
from specscope.trace.wording import plural

FORWARD = 3  # phases after which the logits are there

USAGE = (
    "fork takes temperature=0.7, seed=3 and other sampling parameters; drafter=, tree=, draft_model=; "
    "accept=NODE, reject=NODE, coin=NODE:0.3, token=ID; tail=TEXT (edits the end of the context, drop=N tokens of it); "
    "tokens=N (how far to run)"
)


class EngineWhatIf(WhatIf):
    """Over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # Looking

    def node(self, session: Session, node: int) -> str:
        """The distributions at a node of the step that ran last; it is run again, and must give the same verdict."""
        record, part = session.record, session.part
        if record is None or part is None:
            raise UserError("nothing has run yet")
        if session.phase:
            return describe(look(self.engine, part.request, node), session.history.vocabulary)
        if not any(one is part for one in record.requests):
            raise UserError(f"{part.request} was not in step {record.step}: use goto to reach one of its steps")
        self.engine.rewind(record.step)
        try:
            for _ in range(FORWARD):
                self.engine.phase()
            found = look(self.engine, part.request, node)
        finally:  # whatever could not be shown, the step is whole again
            again = self.engine.step()
        same = [p.tokens() for p in again.requests] == [p.tokens() for p in record.requests]
        note = "" if same else "\nrun again, this step gave ANOTHER verdict: what is shown may not be what was judged"
        return describe(found, session.history.vocabulary) + note

    # Forks

    def fork(self, session: Session, words: Sequence[str]) -> Forked:
        """Run the chosen request from its step again, with and without the changes, and compare."""
        part = session.part
        if part is None:
            raise UserError("nothing has run yet: there is no step to fork from")
        request = self._request(part.request)
        changes, tokens = self._parse(words, part)
        original, changed = (self._run(request, part, these, tokens) for these in (Changes(), changes))
        forced = bool(changes.outcomes or changes.coins or changes.tokens)
        judged = (s.index for s in session.history.requests[part.request].steps if s.verdict is not None)
        index = next((i for i in judged if i >= part.index), part.index)
        dtype = self.engine.run_info.dtype
        return Forked(part.request, index, changes.describe(), original, changed, tokens, dtype, forced)

    def _request(self, name: str) -> Request:
        timeline = self.engine.timeline
        known = [request for _, request in timeline.arrivals] if timeline is not None else []
        found = self.engine.requests.get(name) or next((r for r in reversed(known) if r.id == name), None)
        if found is None:
            raise UserError(f"{name} was added before debugging started, so it cannot be forked")
        return found

    def _run(self, request: Request, part: RequestStep, changes: Changes, tokens: int) -> tuple[RequestStep, ...]:
        """The steps of one side. The blocks that it held are free again afterwards."""
        beside, name = fork(self.engine, request, part, changes)
        steps: list[RequestStep] = []
        while beside.busy and sum(step.emitted for step in steps) < tokens:
            steps += [step for step in beside.step().requests if step.verdict is not None]
        beside.cancel(name)
        return tuple(steps)

    def _parse(self, words: Sequence[str], part: RequestStep) -> tuple[Changes, int]:
        """NAME=VALUE words as changes, and how many tokens to run."""
        position = part.context_len + part.prefill_tokens
        found: dict[str, Any] = {"params": {}, "engine": {}, "outcomes": {}, "coins": {}, "tokens": {}}
        tokens, drop, tail = 64, 0, None
        for word in words:
            name, sign, value = word.partition("=")
            if not sign or not value:
                raise UserError(f"{short(word)}: {USAGE}")
            if name in ("drafter", "tree", "draft_model"):
                found["engine"][name] = value
            elif name in ("accept", "reject"):
                found["outcomes"][position, self._node(value, part)] = name == "accept"
            elif name == "coin":
                node, _, coin = value.partition(":")
                found["coins"][position, self._node(node, part)] = _number(name, coin, 0, 1)
            elif name == "token":
                found["tokens"][position] = int(_number(name, value, 0, self.engine.runner.loaded.vocab_size - 1))
            elif name == "tokens":
                tokens = int(_number(name, value, 1, 100_000))
            elif name == "drop":
                drop = int(_number(name, value, 0, position))
            elif name == "tail":
                tail = list(self.engine.tokenizer(value, add_special_tokens=False)["input_ids"])
            else:
                found["params"][name] = self._parameter(name, value)
        if drop or tail:
            found["tail"] = (drop, tail or [])
        return Changes(**found), tokens

    def _node(self, text: str, part: RequestStep) -> int:
        number = whole(text)
        if number is None or number >= len(part.tree):
            raise UserError(
                f"there is no node {text[:20]}: this step has {plural(len(part.tree), 'node')}, numbered from 0"
            )
        return number

    def _parameter(self, name: str, text: str) -> Any:  # noqa: ANN401
        default = getattr(SamplingParams(), name, None)
        if not isinstance(default, int | float):
            raise UserError(f"{name[:40]} cannot be changed: {USAGE}")
        exact = whole(text)  # a large seed is no float
        return _number(name, text, float("-inf"), float("inf")) if exact is None else exact


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{name}={text[:40]}: give a number") from None
    if not (math.isfinite(number) and least <= number <= most):
        raise UserError(f"{name}={text[:40]}: give a number between {least:g} and {most:g}")
    return number
