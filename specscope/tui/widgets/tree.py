"""The draft tree of the current request and step, with the evidence of every node."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from rich.cells import cell_len
from textual import events

from specscope.debug.viewer import Control
from specscope.trace.history.place import at, brief, ended_by
from specscope.trace.history.wording import about_method, about_sizing, acceptance
from specscope.trace.record.records import RequestStep, StepRecord, Verdict
from specscope.trace.words import how_drawn
from specscope.tui.keys import hidden
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, clean, cut, fit, folded, line_width, paragraph, show_token
from specscope.tui.widgets.decision import likeliest_lines, why_lines
from specscope.tui.widgets.lines import Goto, Panel, Sheet
from specscope.tui.widgets.tree_lines import tree_lines

DECISION = 5  # lines of the decisions that ended a path, beside each other
STATES = {"loading": "Loading", "ended": "Ended"}  # before the first step
LOW = 8  # lines below which a panel has room for the tree alone


class TreePanel(Panel):
    """One line a node: verdict, token, p, q, coin and what the coin had to beat."""

    OF = attrgetter("look.current", "look.at", "look.position", "beginning")

    BINDINGS = hidden(enter="app.step")

    _order: Sequence[int] = ()  # whose node each line of the tree is

    @property
    def beginning(self) -> object:
        """What is shown before the first step, and whether the engine has ended."""
        look, control = self.look, None if self.look is None else self.look.viewer.control
        if look is None or look.steps:
            return look is not None and look.status == "ended"
        return look.status, look.log, look.error, None if control is None else control.progress

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        self._order = ()
        control = look.viewer.control
        if control is not None and not look.steps and (look.status == "loading" or look.log):
            return _loading(look, control, width, height)
        if look.part is None:
            return Sheet(_waiting(look, width), [("Draft tree", "strong")])
        step, record = look.part[1], look.history.steps[look.at]
        title = _title(look, step, record, width - 2)
        if step.verdict is None:
            text = f"{acceptance(step)}; the end of the prompt was not reached"
            return Sheet([_root(look, step, width), [("└─ ", "rail"), (cut(text, width - 3), "dim")]], title)
        ties = look.history.near_ties(step)
        head, lines, self._order = tree_lines(step, step.verdict, look.vocabulary, width, ties)
        answer = paragraph(brief(step, ended_by(step), look.vocabulary), width, "strong") if height >= LOW else []
        blank = line_width(head) - len(head[0][0].lstrip())
        whole = height >= len(answer) + len(lines) + 2
        root = _root(look, step, width if whole else max(blank - 2, 12))
        if whole:
            above = [*answer, root, head]
            room = height - len(lines) - len(above)
            tops = likeliest_lines(at(step, ended_by(step)), look.vocabulary, width)
            tops = tops if room - len(tops) >= DECISION else []
            why = [*why_lines(step, step.verdict, look.vocabulary, width, room - len(tops)), *tops]
        else:  # the root beside the names of the columns
            above, why = [*answer, [*root, (head[0][0][line_width(root) :], head[0][1])]], []
        # The line that the answer is about, and the final token where both fit
        ended, final = (self._order.index(node) for node in (ended_by(step), len(step.tree)))
        keep = final if final - ended < height - len(above) else ended
        return Sheet([*above, *lines, *why], title, keep=keep + len(above), head=len(above))

    def on_click(self, event: events.Click) -> None:
        """Open the step's decisions at the node under the pointer."""
        row = self.line_at(event.get_content_offset_capture(self).y) - self.sheet.head
        if self.look is not None and 0 <= row < len(self._order):
            self.post_message(Goto(self.look.at, node=self._order[row]))


def _loading(look: Look, control: Control, width: int, height: int) -> Sheet:
    """What it does, or how it ended before its first step, and the end of its log."""
    ended = look.status == "ended"
    said = f"it ended: {look.error}" if look.error else "it ended" if ended else control.progress
    *before, last = said.split("\n")
    lines: list[Line] = [[]]
    for stage in before:
        lines += _indented(stage, width, "dim")
    lines += _indented(last, width, "rejected" if look.error else "strong")
    room, logged = height - len(lines) - 1, deque[Line]()
    for line in reversed(look.log):
        rows = _indented(line, width, "text")
        if len(logged) + len(rows) > room:
            logged.extendleft(reversed(rows[len(rows) - room :] if not logged and room > 0 else []))
            break
        logged.extendleft(reversed(rows))
    return Sheet([*lines, *([[], *logged] if logged else [])], [(STATES.get(look.status, "No steps yet"), "strong")])


def _indented(text: str, width: int, ink: Ink) -> list[Line]:
    """A paragraph behind two blanks."""
    return [[("  " + row, ink)] for row in folded(text, width - 2)]


def _waiting(look: Look, width: int) -> list[Line]:
    """What an engine without any step yet waits for: the keys that start it."""
    if not look.asks or look.steps or look.status not in ("paused", "idle"):
        return [[(look.absence, "dim")]]
    paused = look.status == "paused"
    lines: list[Line] = [[], [("  paused before the first step" if paused else "  no prompt yet", "strong")]]
    starts = (("space", "starts the run"), (".", "runs one step"), (":", "sets a breakpoint first"))
    for key, what in (*(starts if paused else ()), ("i", "gives it a prompt")):
        lines.append(fit([(0, [(f"  {key:<7}", "key"), (what, "text")])], width))
    return lines


def _title(look: Look, step: RequestStep, record: StepRecord, width: int) -> Line:
    """Request, step and result; what fits of how the tree came about."""
    parts: list[tuple[int, Line]] = [(0, [(clean(step.request), "strong")])]
    if look.at == look.position:
        parts.append((1, [(f"step {record.step}", "text")]))
    else:
        parts.append((1, [(f"last step {record.step}", "warn")]))
    if step.verdict is not None:
        kind: Ink = step.verdict.kind.value
        token = cut(show_token(look.vocabulary, step.verdict.token), 16)
        used = sum(line_width(part) + 3 for _, part in parts)
        whole, brief = acceptance(step), acceptance(step, short=True)
        forms = [(made, final) for made in (whole, brief) for final in (f" → {kind} {token}", f" → {token}", "")]
        made, final = next((form for form in forms if used + cell_len("".join(form)) <= width), (brief, ""))
        parts.append((2, [(made, "text"), (final, kind)]))
    else:
        parts.append((2, [("prefill", "accent")]))
    if len(step.tree):
        parts.append((6, [(how_drawn(step.tree), "dim")]))
    if step.drafter and step.drafter != "none":
        parts.append((5, [(clean(step.drafter), "dim")]))
    return fit(parts, width, " · ")


def _root(look: Look, step: RequestStep, width: int) -> Line:
    """The last committed token, from which the tree grows, and the state it was in."""
    parts: list[tuple[int, Line]] = [(0, [("● ", "accent"), (cut(_root_token(look, step), 20), "strong")])]
    parts.append((1, [(f"context {step.context_len:,}", "dim")]))
    if step.verdict is not None and step.emitted < step.verdict.accepted + 1:
        parts.append((2, [(f"{step.emitted} of {step.verdict.accepted + 1} emitted", "warn")]))
    if step.notes is not None and len(step.notes.dropped_token):
        parts.append((3, [(f"{len(step.notes.dropped_token)} nodes dropped", "dim")]))
    if step.sizing:
        parts.append((3, [(about_sizing(step), "dim")]))
    if step.lossy:
        parts.append((1, [(f"{clean(step.rule)}: not lossless", "warn")]))
    if step.method is not None:
        parts += [(3, [(remark, "dim")]) for remark in about_method(step.method)]
    parts.append((5, [(f"{clean(step.request)}@{step.index}", "dim")]))
    if step.prefill_tokens and step.verdict is not None:
        parts.append((4, [(f"prefill {step.prefill_tokens:,}", "dim")]))
    return fit(parts, width, " · ")


def _root_token(look: Look, step: RequestStep) -> str:
    """The token before the step's first: the one the step before ended with, or the prompt's last."""
    if look.request is None or look.part is None:
        return "root"
    if look.part[0] > 0:
        before: Verdict | None = look.request.steps[look.part[0] - 1].verdict
        if before is not None:
            return show_token(look.vocabulary, before.token)
    info = look.request.info
    if info is None or not len(info.prompt_tokens) or step.verdict is None:
        return "root"
    return show_token(look.vocabulary, int(info.prompt_tokens[-1]))
