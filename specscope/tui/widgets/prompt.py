"""The debugger's prompt over the main screen: `:` opens it, Esc closes it, what it said stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.events import Key, Paste
from textual.screen import ModalScreen
from textual.widgets import Input, RichLog

from specscope.tui.keys import hidden
from specscope.tui.standing import KEPT, Talk
from specscope.tui.text import folded

T = TypeVar("T")
HINT = "help lists the commands. For example: break reject, continue, tree, node 0."


def hanging(line: str, width: int) -> list[str]:
    """The line in pieces of at most `width` cells; what is too long for the last column of a table goes on below it."""
    if cell_len(line) <= width:
        return [line]
    start = max((match.end() for match in re.finditer(r"\s{2,}", line) if match.end() <= width // 2), default=0)
    first, *more = folded(line[start:], width - start)
    return [line[:start] + first, *(" " * start + row for row in more)]


class TypedScreen(ModalScreen[T]):
    """A dialog with an input. Keys that were typed before it had the focus go to it, too."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead: list[Key] = []  # typed before the input was there

    async def on_show(self) -> None:
        ahead, self._ahead = self._ahead, []
        for key in ahead:
            await self.typed(key)

    async def typed(self, key: Key) -> bool:
        """Take a key that reached nothing else; whether it is of use here. A focused input takes letters itself."""
        box = next(iter(self.query(Input)), None)
        if not key.is_printable and (key.key != "enter" or (box is not None and box.has_focus)):
            return False
        if box is None:
            self._ahead.append(key)
        elif key.key == "enter":
            await box.action_submit()
        else:
            box.insert_text_at_cursor(key.character or "")
        return True


class Line(Input):
    """An input whose line is gone as soon as it is sent: what is typed behind Enter begins the next."""

    async def on_key(self, event: Key) -> None:
        if event.key == "enter":  # here, and not as a binding of the app: what is typed behind it has not come yet
            event.stop()
            await self.action_submit()
        elif event.key == "ctrl+c" and self.selection.is_empty:  # else it copies
            event.stop()
            event.prevent_default()
            await self.app.action_quit()

    async def action_submit(self) -> None:
        await super().action_submit()
        self.value = ""

    async def on_paste(self, event: Paste) -> None:
        """Several lines are sent one after the other; the last stays to be sent."""
        *lines, last = event.text.splitlines() or [""]
        for line in lines:
            self.insert_text_at_cursor(line)
            await self.action_submit()
        if lines:
            self.insert_text_at_cursor(last)
            event.prevent_default()
            event.stop()


class DebugPrompt(TypedScreen[None]):
    """A log and a line to type. `run` is given each line; what comes back is shown when it comes."""

    BINDINGS = [  # noqa: RUF012
        *hidden(escape="dismiss(None)", up="earlier(-1)", down="earlier(1)"),
        Binding("tab", "complete", show=False, priority=True),
    ]

    def __init__(self, talk: Talk, run: Callable[[str], None], complete: Callable[[str], list[str]]) -> None:
        super().__init__()
        self.talk, self._run, self._complete = talk, run, complete
        self._at = len(talk.typed)

    def compose(self) -> ComposeResult:
        with Vertical(id="debug-prompt") as box:
            box.border_title = Text("Debugger")
            box.border_subtitle = Text("help · Tab completes · ↑ history · Esc closes")
            yield RichLog(id="said", wrap=True, min_width=20, max_lines=KEPT)
            line = Line(placeholder="break reject if depth == 1 and p < 0.1", id="line", select_on_focus=False)
            line.cursor_blink = False
            yield line

    def on_mount(self) -> None:
        self.query_one(RichLog).can_focus = False
        self._show(self.talk.said or [(False, HINT)])
        self.query_one(Input).focus()

    def hear(self, text: str) -> None:
        self._show(self.talk.add(text))

    def _show(self, lines: list[tuple[bool, str]]) -> None:
        log = self.query_one(RichLog)
        width = max(log.scrollable_content_region.width, 20) if log.size.width else None
        for typed, line in lines:
            for row in hanging(f": {line}" if typed else line, width) if width else [line]:
                log.write(Text(row, style="bold" if typed else ""), width=width)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """A line was typed; an empty one repeats the last, as the debugger has it."""
        line = event.value
        if line.strip():
            self.talk.typed.append(line)
            self._show(self.talk.add(line, typed=True))
        self._at = len(self.talk.typed)
        self._run(line)

    def action_earlier(self, way: int) -> None:
        """Recall an earlier line, or a later one."""
        self._at = min(max(self._at + way, 0), len(self.talk.typed))
        box = self.query_one(Input)
        box.value = self.talk.typed[self._at] if self._at < len(self.talk.typed) else ""
        box.cursor_position = len(box.value)

    def action_complete(self) -> None:
        """Complete a word if only one fits; else list all that fit."""
        box = self.query_one(Input)
        completions = self._complete(box.value)
        head, _, _ = box.value.rpartition(" ")
        if len(completions) == 1:
            box.value = f"{head} {completions[0]} " if head else f"{completions[0]} "
            box.cursor_position = len(box.value)
        elif completions:
            self.hear("  ".join(completions[:24]))
