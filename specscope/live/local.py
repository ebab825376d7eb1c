"""The debugger over an engine in this process: sessions, and the commands that need the engine: looks and forks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from specscope.debug.command_table import FORK_PARAMS
from specscope.debug.commands import Commands, WhatIf
from specscope.debug.forked import Forked
from specscope.debug.kv_check import KVCheck
from specscope.debug.session import Session
from specscope.debug.views import NodeView
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.engine.prompts import PromptSpec
from specscope.engine.request import Request
from specscope.engine.scheduler import TOO_SMALL
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.live.check_kv import check_kv
from specscope.live.fork import forked
from specscope.live.inspect import view_begun, view_earlier, view_last
from specscope.live.start import start_engine, too_long
from specscope.speculate.changes import Changes
from specscope.trace.checked import short, whole
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.records import FinishReason, RequestStep, StepRecord
from specscope.trace.record.rules import MATCH

TINY = 2.0**-53  # coins lie in the open interval (0, 1)
USAGE = "write NAME=VALUE, such as temperature=0.7; help fork lists every NAME"


def commands_over(engine: Engine) -> Commands:
    """The console's commands over an engine, which must not have run yet where going back to its start is wanted."""
    session = Session(History(run=engine.run_info, vocabulary=engine.vocabulary), engine)
    return Commands(session, EngineWhatIf(engine))


def live_commands(config: EngineConfig, specs: Sequence[PromptSpec]) -> Commands:
    """Load an engine, give it prompts, and stand before its first step. Raises UserError."""
    with ends_at_once():
        progress = lambda stage: print(f"{stage} ...", file=sys.stderr)  # noqa: E731
        for line in too_long(config, specs, progress).values():
            raise UserError(line)
        engine = start_engine(config, progress)
    commands = commands_over(engine)
    for spec in specs:
        engine.add_spec(spec)
    return commands


class EngineWhatIf(WhatIf):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # Looking

    def view(self, session: Session, node: int | None) -> NodeView:
        """Distributions in the session's step, of the one that was begun where there is one."""
        record, part = session.record, session.part
        if session.phase and part is not None:
            return view_begun(self.engine, part.request, node)
        if record is None or part is None:
            raise UserError("nothing has run yet")
        if (part.request, part.index) not in {(other.request, other.index) for other in record.requests}:
            raise UserError(f"{part.request} was not in step {record.step}: use goto to reach one of its steps")
        return self._view(session, record, part, node)

    def look(self, session: Session, step: int, request: str, node: int | None) -> NodeView:
        """As `view`, for any step on the engine's path, wherever the engine is."""
        position = session.history.position_of(step)
        record = None if position is None else session.history.steps[position]
        parts = () if record is None else record.requests
        part = next((other for other in parts if other.request == request), None)
        if record is None or part is None:
            raise UserError(f"{request} in step {step} was not run by this engine")
        return self._view(session, record, part, node)

    def _view(self, session: Session, record: StepRecord, part: RequestStep, node: int | None) -> NodeView:
        if self.engine.last is not None and self.engine.last.known == record:
            return view_last(self.engine, part, node)
        return view_earlier(self.engine, session.history.requests[part.request], record.step, part, node)

    def check_kv(self, session: Session) -> KVCheck:
        request = session.current_request
        if request is None:
            raise UserError("nothing has run yet: no KV is cached")
        return check_kv(self.engine, request.id)

    # Forks

    def fork(self, session: Session, words: Sequence[str]) -> Forked:
        """Run the current request from its step again with the changes, and compare with the record."""
        part = session.part
        if part is None:
            raise UserError("nothing has run yet: there is no step to fork from")
        request = self._request(part.request)
        changes, tokens = self._parse(words, part)
        made = part.context_len + part.prefill_tokens + 1 - len(request.prompt_tokens)
        if (limit := changes.params.get("max_tokens", made + 1)) <= made:
            raise UserError(f"max_tokens={limit}: the request has {plural(made, 'output token')} before this step")
        forced = bool(changes.outcomes or changes.coins or changes.tokens)
        if forced and part.verdict is None:
            raise UserError(f"step {part.index} of {part.request} is a prefill chunk: it draws no token to change")
        changed = self._run(request, part, changes, tokens)
        recorded = session.history.requests[part.request]
        known = [s for s in recorded.steps if s.index >= part.index and s.verdict is not None]
        dtype, described, note = self.engine.run_info.dtype, changes.describe(), ""
        if recorded.end is None and sum(s.emitted for s in known) < tokens:  # the run has not come so far yet
            again = self._run(request, part, Changes(), tokens)
            alone = Forked(part.request, part.index, "", tuple(known), again[: len(known)], tokens, dtype, forced=False)
            if alone.differ:  # what the change did shows beside a run that was alone too
                known = []
                cause = "rounding in its batch" if alone.near_tie else "something other than rounding: try check kv"
                note = f"the original here is the request run again alone; it differs from the record, by {cause}"
            known += again[len(known) :]
        index = known[0].index if known else part.index
        starts = accumulate((step.emitted for step in known), initial=0)
        original = tuple(step for step, start in zip(known, starts, strict=False) if start < tokens)
        both = Forked(part.request, index, described, original, changed, tokens, dtype, forced, note)
        return replace(both, explained=self._explained(both, request, changes))

    def _explained(self, both: Forked, request: Request, changes: Changes) -> str:
        """The changes that explain where the two part, in words. A value set to what it already was changes nothing."""
        config = self.engine.config
        engine = {name: value for name, value in changes.engine.items() if str(getattr(config, name)) != value}
        after = replace(request.params, **changes.params)
        steps = (*both.original, *both.fork)
        lossless = not any(step.lossy or (step.verdict is not None and len(step.verdict.forced)) for step in steps)
        ended = both.same >= min(map(len, both.outputs))
        return replace(changes, engine=engine).explaining(request.params, after, lossless=lossless, ended=ended)

    def _request(self, name: str) -> Request:
        timeline = self.engine.timeline
        known = timeline.arrivals() if timeline is not None else ()
        request = self.engine.requests.get(name) or next((r for r in known if r.id == name), None)
        if request is None:
            raise UserError(f"{name} was added before debugging started, so it cannot be forked")
        return request

    def _run(self, request: Request, part: RequestStep, changes: Changes, tokens: int) -> tuple[RequestStep, ...]:
        """The steps of a fork. Raises UserError where it cannot go on."""
        steps: list[RequestStep] = []
        with forked(self.engine, request, part, changes) as beside:
            while beside.busy and sum(step.emitted for step in steps) < tokens:
                record = beside.step()
                steps += [step for step in record.requests if step.verdict is not None]
                failed = next((end.error for end in record.finished if end.reason is FinishReason.ERROR), "")
                made = plural(sum(step.emitted for step in steps), "token")
                if self.interrupted():
                    raise UserError(f"interrupted: the fork had made {made}, and the engine stands where it did")
                if failed == TOO_SMALL:
                    raise UserError(f"the fork ran out of KV blocks after {made}: raise --kv-memory")
                if failed:
                    raise UserError(f"the fork ended after {made}: {failed}")
        return tuple(steps)

    def _parse(self, words: Sequence[str], part: RequestStep) -> tuple[Changes, int]:
        """NAME=VALUE words as changes, and how many tokens to run."""
        position = part.context_len + part.prefill_tokens
        fields: dict[str, Any] = {"params": {}, "engine": {}, "outcomes": {}, "coins": {}, "tokens": {}}
        tokens, given = 64, set[str]()
        for word in words:
            name, sign, value = word.partition("=")
            if not sign or not value:
                raise UserError(f"{short(word)}: {USAGE}")
            node = value.partition(":")[0] if name in ("accept", "reject", "coin") else ""
            what = f"{'coin' if name == 'coin' else 'outcome'} of node {node}" if node else name
            if what in given:
                raise UserError(f"{short(word)}: {short(what)} is given twice")
            given.add(what)
            if name in ("drafter", "tree", "draft_model", "rule"):
                fields["engine"][name] = value
            elif name in ("accept", "reject"):
                fields["outcomes"][position, self._node(value, part)] = name == "accept"
            elif name == "coin":
                node, sign, coin = value.partition(":")
                if not sign:
                    raise UserError(f"{short(word)}: write coin=NODE:COIN, such as coin=0:0.5")
                fields["coins"][position, self._node(node, part)] = _number(name, coin, TINY, 1 - TINY)
            elif name == "token":
                fields["tokens"][position] = int(_number(name, value, 0, self.engine.runner.loaded.vocab_size - 1))
            elif name == "tokens":
                tokens = int(_number(name, value, 1, 100_000))
            else:
                if name not in FORK_PARAMS:
                    raise UserError(f"a fork cannot change {short(name)}: {USAGE}")
                exact = whole(value)  # a large seed is no float
                fields["params"][name] = _number(name, value, -math.inf, math.inf) if exact is None else exact
        self._check_coins(fields, part)
        return Changes(**fields), tokens

    def _check_coins(self, fields: dict[str, Any], part: RequestStep) -> None:
        """Under `match` siblings share one coin, the first one's. Raises UserError for a coin of another."""
        if fields["engine"].get("rule", self.engine.config.rule) != MATCH:
            return
        for _, node in fields["coins"]:
            first = part.tree.children(int(part.tree.parent[node]))[0]
            if node != first:
                raise UserError(f"with rule match, siblings share the coin of node {first}: write coin={first}:COIN")

    def _node(self, text: str, part: RequestStep) -> int:
        number = whole(text)
        if number is None or number >= len(part.tree):
            raise UserError(
                f"there is no node {text[:20]}: this step has {plural(len(part.tree), 'node')}, numbered from 0"
            )
        return number


def _number(name: str, text: str, smallest: float, largest: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{name}={text[:40]}: give a number") from None
    if not (math.isfinite(number) and smallest <= number <= largest):
        raise UserError(f"{name}={text[:40]}: give a number between {smallest:g} and {largest:g}")
    return number
