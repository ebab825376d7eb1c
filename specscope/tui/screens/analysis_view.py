"""Over many steps: the tokens that are rejected most; each row leads to an example step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

from textual.app import ComposeResult
from textual.containers import Container

from specscope.analyze.findings import Reference
from specscope.analyze.questions.answers import answer, tokens_table
from specscope.analyze.questions.evidence import snapshot
from specscope.analyze.table import Table
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.tui.keys import Key, foot
from specscope.tui.look import Look
from specscope.tui.screens.over import Over, close
from specscope.tui.text import clean
from specscope.tui.widgets.grid import GridPanel, RowPanel
from specscope.tui.widgets.lines import Goto

LEAST = 3.0  # seconds between two answers while steps come in
SHARE = 0.1  # share of the time that may go into answering


class AnalysisScreen(Over):
    """Answers are worked out beside the screen, and again when there are more steps."""

    FIRST = GridPanel
    KEYS = (
        Key("enter", "screen.go", "The clearest example", "⏎", "clearest example", 0),
        Key("f", "screen.go('first')", "The first example", "f", "first", 3),
        *foot(scope=4, filter=5, sort=6, reverse=7, requests=9, help=8),
        close(2, "escape,q,a"),
    )

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self._asked: Hashable = None  # what the answers are of, or will be
        self._busy = False
        self._failed = ""  # why there is no answer
        self._due = 0.0  # when the next answer may be worked out
        self._waits = False

    def parts(self) -> ComposeResult:
        rows = GridPanel("rows")
        with Container(id="of-analysis"):
            yield rows
            yield RowPanel(rows, "row")

    @property
    def _rows(self) -> GridPanel:
        return self.query_one(GridPanel)

    def show(self, look: Look) -> None:
        """A new look: there may be more to ask about."""
        if self._rows.grid is None:
            looking = f"looking over {plural(look.steps, 'step')}…" if look.steps else "no steps yet"
            self._rows.asking = self._failed or looking
        super().show(look)
        self._ask(look)

    def _ask(self, look: Look) -> None:
        """Compute the answers if steps have come or gone since the last time; not too often while steps come in."""
        history = look.history
        subject = (id(history), history.rewinds, look.scope)
        asked = (subject, len(history.steps), history.gone)
        if asked == self._asked or self._busy or not history.steps:
            return
        same = isinstance(self._asked, tuple) and self._asked[0] == subject
        wait = self._due - time.monotonic() if same else 0.0
        if wait > 0:
            if not self._waits:
                self._waits = True
                self.set_timer(wait, self._again)
            return
        self._asked, self._busy = asked, True
        self.run_worker(self._answer(snapshot(history), look.scope, _over(look)), exit_on_error=False)

    def _again(self) -> None:
        self._waits = False
        if self.is_current:
            self._ask(self.last)

    async def _answer(self, history: History, request: str | None, over: str) -> None:
        """Compute the answers in a thread, so that keys still work."""
        began = time.monotonic()
        try:
            answers = await asyncio.to_thread(_work_out, history, request)
            self._rows.put_answers(answers, over)
            self._failed = ""
        except Exception as error:  # the screen outlives any record
            self._failed = clean(f"cannot answer this: {type(error).__name__}: {error}")
        finally:
            self._busy = False
            self._due = time.monotonic() + max(LEAST, (time.monotonic() - began) / SHARE)
        self.show(self.last)

    def action_go(self, which: str = "clearest") -> None:
        if (examples := self._rows.example) is None:
            return
        example: Reference = getattr(examples, which)
        position = self.last.history.position_of(example.step)
        if position is None:
            self.notify(f"step {example.step:,} is no longer kept")
        else:
            part = self.last.history.part(example.request, position)
            node = len(part[1].tree) if example.node is None and part is not None else example.node
            self.post_message(Goto(position, example.request, node))


def _work_out(history: History, request: str | None) -> Table:
    return tokens_table(answer(history, request), history.vocabulary)


def _over(look: Look) -> str:
    """What the answers are over."""
    scope = "all requests" if look.pooled else clean(look.scope or "no request")
    return f"{scope}, {plural(look.steps, 'step')}"
