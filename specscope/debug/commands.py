"""The debugger's command line: gdb's and pdb's names, unique prefixes, help for each.

`Commands.run(line)` returns the text to show. The console, the screen's prompt and scripts all use it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence

from specscope.debug import show
from specscope.debug.answers import Answer, Stop, StopReason
from specscope.debug.breakpoints import EventKind, types_of
from specscope.debug.command_table import (
    COMMANDS,
    FORK_TAKES,
    INFO_TAKES,
    ConsoleCommand,
    command,
    find,
    help_all,
    help_of,
)
from specscope.debug.forked import Forked
from specscope.debug.kv_check import KVCheck, kv_check_text
from specscope.debug.session import Session
from specscope.debug.show import place_text, why_text
from specscope.debug.views import NodeView, view_text
from specscope.errors import UserError
from specscope.gone import refuse_gone
from specscope.trace.checked import short, whole
from specscope.trace.history.conditions import Expression
from specscope.trace.record.vocabulary import printable
from specscope.trace.words import NODE, StepFacts

MOST_COUNT = 10**9


def goes_on_text(stands: int, viewed: int) -> str:
    """What a command says that moves the run while an earlier step is in view."""
    return f"step {viewed} was in view; the run continues from step {stands}, where the engine is"


class WhatIf:
    """What `fork` and `node` need; a live engine has one (live/local.py)."""

    interrupted: Callable[[], bool] = staticmethod(lambda: False)  # asked after each step of a fork: whether to end it

    def fork(self, session: Session, words: Sequence[str]) -> Forked:
        """Run a fork and compare it with the original. Raises UserError."""
        raise UserError("a fork needs a live engine: specscope debug PROMPT, or specscope run")

    def look(self, session: Session, step: int, request: str, node: int | None) -> NodeView:
        """As `view`, for any step on the engine's path. Raises UserError."""
        return self.view(session, node)

    def check_kv(self, session: Session) -> KVCheck:
        """The current request's cached KV beside KV computed afresh. Raises UserError."""
        raise UserError("a capture holds no KV: check kv needs a live engine: specscope debug PROMPT, or specscope run")

    def view(self, session: Session, node: int | None) -> NodeView:
        """Distributions where a node of the session's step was drawn, or the final token (None). Raises UserError."""
        raise UserError("whole distributions need a live engine: specscope debug PROMPT, or specscope run")


class Commands:
    """A debugger that takes lines of text."""

    def __init__(self, session: Session, what_if: WhatIf | None = None) -> None:
        self.session, self.what_if = session, what_if or WhatIf()
        self.quitting = False
        self.forked: Forked | None = None  # the last fork, for a screen to show both sides
        self._checked: dict[str, tuple[int, KVCheck | None]] = {}  # by request the last check of its KV, and the step
        self._last = ""
        self._stop: Stop | None = None  # the last one of the line that is run

    def run(self, line: str) -> str:
        """Run one line; what it prints. Raises UserError for a line that is refused, and changes nothing then."""
        return self.answer(line).text

    def answer(self, line: str, viewed: int | None = None, request: str = "") -> Answer:
        """As `run`, with the stop that the line ended in. `request`: chosen where the line was typed; "" for none.

        `viewed`: the number of the step in view, where that is an earlier one than the engine stands at. Commands that
        look are about it; those that move the run go on from where the engine stands, and say so.
        """
        self._stop, self.session.request = None, request or self.session.request
        typed = " ".join(line.splitlines())  # pasted text may have ends of lines in it
        line, command, history = self._meant(typed), self.command_of(typed), self.session.history
        if command is None:
            return Answer(typed, "")
        goes_on = "" if viewed is None else goes_on_text(history.last_step, viewed) + "\n"
        if viewed is not None and command.looks:
            self.session.viewed = history.position_of(viewed)
            if self.session.viewed is None:
                raise UserError(f"step {viewed} is no longer part of the run")
        self._last = line if command.repeats else ""
        try:
            text: str = getattr(self, command.method)(line.partition(" ")[2].strip())
        finally:
            self.session.viewed = None
        text = f"{goes_on}{text}" if self._stop is not None else text
        text = printable(text, keep="\n")  # it may quote prompts and outputs
        return Answer(typed, text, self._stop, self.session.request)

    def _meant(self, line: str) -> str:
        """The line without comments; an empty line repeats the last one, if that may be repeated."""
        line = line.strip()
        return "" if line.startswith("#") else line or self._last

    def command_of(self, line: str) -> ConsoleCommand | None:
        """The command of a line; None for a comment and for nothing. Raises UserError for no command."""
        words = self._meant(line).split()
        return find(words[0]) if words else None

    def complete(self, line: str) -> list[str]:
        """Completions: commands, events, names of the evidence."""
        head, _, last = line.rpartition(" ")
        if not head:
            return sorted(c.name for c in COMMANDS if c.name.startswith(line))
        known: Iterable[str] = sorted(NODE)
        if head.split() in (["b"], ["break"]):
            known = (kind.value for kind in EventKind)
        elif head.split() in (["h"], ["help"]):
            known = sorted(c.name for c in COMMANDS)
        return [name for name in known if name.startswith(last)]

    # Stops

    def stopped(self, stop: Stop) -> str:
        self.reach(stop)
        lines = [self.session.parted, why_text(stop), place_text(stop, self.session)]
        self.session.parted = ""
        return "\n".join(line for line in lines if line)

    def reach(self, stop: Stop) -> None:
        self._stop = stop
        if stop.hits:  # the current request stays where it is among them
            hit = next((hit for hit in stop.hits if hit.request == self.session.request), stop.hits[0])
            self.session.request, self.session.node = hit.request, hit.node
        elif stop.request:
            self.session.request = stop.request

    # Moving

    def _count(self, text: str) -> int:
        if not text:
            return 1
        count = whole(text)
        if count is None or not 1 <= count <= MOST_COUNT:
            raise UserError(f"COUNT must be a number from 1 to {MOST_COUNT:,}, not {short(text)}")
        return count

    @command(short=("c",))
    def do_continue(self, text: str) -> str:
        """Run to the next breakpoint, or to the end of the run."""
        return self.stopped(self.session.cont())

    @command("[COUNT]", short=("n",), repeats=True)
    def do_next(self, text: str) -> str:
        """Run one engine step, or COUNT steps."""
        return self.stopped(self.session.next(self._count(text)))

    @command()
    def do_pause(self, text: str) -> str:
        """In vLLM or specscope serve: stop at the next step; Ctrl-C does so while a command waits."""
        return self.stopped(self.session.pause())

    @command("[COUNT]", short=("s",), repeats=True)
    def do_step(self, text: str) -> str:
        """Run COUNT phases (default 1): schedule, draft, forward, verify, commit."""
        count = self._count(text)
        if self.session.engine is None:
            return self.do_next(text)
        stop = self.session.step()
        for _ in range(count - 1):
            if stop.reason not in (StopReason.PHASE, StopReason.STEP):
                break
            stop = self.session.step()
        return self.stopped(stop)

    @command("[REQUEST]", short=("fin",))
    def do_finish(self, text: str) -> str:
        """Run until REQUEST ends (default: the current request)."""
        return self.stopped(self.session.finish(text))

    @command("EXPR", short=("u",))
    def do_until(self, text: str) -> str:
        """Run until EXPR is true for a step of any request."""
        return self.stopped(self.session.until(text))

    @command(short=("rc",))
    def do_reverse_continue(self, text: str) -> str:
        """Go back to the previous breakpoint."""
        return self.stopped(self.session.reverse_continue())

    @command("[COUNT]", short=("rn",), repeats=True)
    def do_reverse_next(self, text: str) -> str:
        """Go back one engine step, or COUNT steps."""
        return self.stopped(self.session.reverse_next(self._count(text)))

    @command("STEP|NAME[@N]|start|end")
    def do_goto(self, text: str) -> str:
        """Go to just after STEP, to step N of request NAME (NAME alone selects it), or the start or last step (end)."""
        history = self.session.history
        if text in ("start", "end"):
            return self.stopped(self.session.goto(-1) if text == "start" else self.session.goto_end())
        number = whole(text)
        if number is not None:
            return self.stopped(self.session.goto_step(number))
        if text not in history.requests and "@" not in text:
            ways = "give a step or a request: goto 17, goto r3, goto r3@17, goto start or goto end"
            raise UserError(f"there is no request {short(text)}: {ways}" if text else ways)
        request, place = history.find(text)
        stop = self.stopped(self.session.goto_request(request.id, place.index))
        if place.node is None or self.session.part is None:
            return stop
        self.session.node = self._node_number(str(place.node))
        return show.where(self.session)

    # Breakpoints

    @command("EVENT [if EXPR]", short=("b",), passive=True)
    def do_break(self, text: str) -> str:
        """Stop at EVENT (if EXPR is true): {events}."""
        event, _, condition = text.partition(" ")
        match = re.fullmatch(r"if\b(.*)", condition.strip())
        if condition.strip() and not (match and match[1].strip()):
            raise UserError(f"write break {event} if {'EXPR' if match else condition.strip()}")
        point = self.session.breakpoints.add(event, match[1].strip() if match else "")
        return f"breakpoint {point.number}: {point.describe()}"

    @command("EXPR", passive=True)
    def do_watch(self, text: str) -> str:
        """Stop when EXPR becomes true or false for a request."""
        point = self.session.breakpoints.watch(text.removeprefix("if ").strip())
        return f"breakpoint {point.number}: {point.describe()}"

    @command("[N|EVENT ...]", short=("d", "clear"), passive=True)
    def do_delete(self, text: str) -> str:
        """Delete breakpoints N ..., those at EVENT ..., or all of them."""
        gone = self.session.breakpoints.delete(text.replace(",", " ").split())
        return "\n".join(f"deleted breakpoint {point.number}: {point.describe()}" for point in gone)

    # Looking

    @command("|".join(name for name, _ in INFO_TAKES), short=("i",), passive=True, looks=True, takes=INFO_TAKES)
    def do_info(self, text: str) -> str:
        """Show one of these."""
        kinds = [name for name, _ in INFO_TAKES]
        matches = [name for name in kinds if text and name.startswith(text)]
        if len(matches) != 1:
            refuse_gone(f"info {text}")
            raise UserError(f"give one of: info {', '.join(kinds)}")
        shown: str = getattr(show, matches[0])(self.session)
        return shown

    @command("EXPR [@ NODE]", short=("p",), looks=True)
    def do_print(self, text: str) -> str:
        """Show the value of EXPR at NODE (default: the current node, else the step)."""
        expression, _, place = (word.strip() for word in text.partition("@"))
        record, part = self.session.part_record, self.session.part
        if record is None or part is None:
            raise UserError("nothing has run yet")
        node = self.session.node if not place else None if place == "root" else self._node_number(place)
        kind = EventKind.REJECT if node is not None else EventKind.STEP
        if node is None and expression in NODE and expression not in types_of(kind):
            raise UserError(f"{expression} belongs to a node: write print {expression} @ NODE")
        value = Expression(expression, types_of(kind)).value(
            StepFacts(record, part.request, part, self.session.history, node)
        )
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    @command("kv")
    def do_check(self, text: str) -> str:
        """Recompute the KV of the current request and compare it with what target and drafter hold."""
        if text != "kv":
            raise UserError("write check kv")
        self._need_tokens()
        check, step = self.what_if.check_kv(self.session), self.session.history.last_step
        last, before = self._checked.get(check.request, (step, None))
        self._checked[check.request] = step, check
        steps = f"between steps {last} and {max(step, last + 1)}"  # what is committed is never written again
        return kv_check_text(check, self.session.history.vocabulary, before if last <= step else None, steps)

    @command(short=("t",), looks=True)
    def do_tree(self, text: str) -> str:
        """Draw the step's tree with its verdicts."""
        return show.tree(self.session)

    @command("[N]", looks=True)
    def do_node(self, text: str) -> str:
        """Show all evidence on node N (default: the current node) and make it the current node."""
        if not text and self.session.node is None:
            raise UserError("there is no current node: give a number, such as node 0")
        if self.session.phase:  # a step was begun: its tree is not judged yet
            begun = whole(text)
            if begun is None:
                raise UserError("give a number, such as node 0: a step in progress has no current node")
            return "of the step in progress:\n" + self._view(begun)
        number = self._node_number(text or str(self.session.node))
        try:
            deeper = self._view(number)
        except UserError as error:
            deeper = str(error)
        self.session.node = number
        return show.node(self.session, number) + "\n" + deeper

    @command("[N]", looks=True)
    def do_why(self, text: str) -> str:
        """Explain node N's verdict; without N, the step's path and what ended it."""
        if self.session.phase:
            raise UserError("the step in progress is not judged yet: next finishes it")
        if not text:
            return show.why(self.session, None)
        part, number = self.session.part, whole(text)
        final = part is not None and part.verdict is not None and number == len(part.tree)
        return show.why(self.session, number if final else self._node_number(text))

    @command(short=("w",), looks=True)
    def do_where(self, text: str) -> str:
        """Show the current step, request and node."""
        return show.where(self.session)

    @command("N")
    def do_branch(self, text: str) -> str:
        """Show branch N of a recorded run, at its last step."""
        number = whole(text)
        if number is None:
            raise UserError("give a branch, such as branch 0: info branches lists them")
        return self.stopped(self.session.show_branch(number))

    @command("NAME", short=("r",), looks=True)
    def do_request(self, text: str) -> str:
        """Select request NAME."""
        if text not in self.session.history.requests:
            known = ", ".join(self.session.history.requests) or "none yet"
            raise UserError(f"there is no request {short(text)}; there are: {known}")
        self.session.request = text
        return show.where(self.session)

    @command("[NAME=VALUE ...]", looks=True, takes=FORK_TAKES)
    def do_fork(self, text: str) -> str:
        """Run the request again from this step with changes, and compare the two runs."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError("unbalanced quotes" if "quot" in str(error) else str(error).lower()) from error
        self._need_tokens()
        self.forked = self.what_if.fork(self.session, words)
        return self.forked.describe(self.session.history.vocabulary)

    def _node_number(self, text: str) -> int:
        part = self.session.part
        number = whole(text)
        if part is None or number is None or number >= len(part.tree):
            known = f"nodes are numbered 0 to {len(part.tree) - 1}" if part and len(part.tree) else "the tree is empty"
            raise UserError(f"there is no node {text[:20]}; {known}")
        return number

    def _view(self, node: int) -> str:
        self._need_tokens()
        return view_text(self.what_if.view(self.session, node), self.session.history.vocabulary)

    def _need_tokens(self) -> None:
        """Refuse a command whose answer names tokens, where token ids are left out."""
        run = self.session.history.run
        if run is not None and not run.tells_tokens:
            raise UserError(f"this shows tokens, and {run.privacy.flag} left them out")

    # The debugger itself

    @command("[COMMAND]", short=("h", "?"), passive=True)
    def do_help(self, text: str) -> str:
        """List all commands, or explain one."""
        return help_of(find(text)) if text else help_all()

    @command(short=("q", "exit"))
    def do_quit(self, text: str) -> str:
        """Leave the debugger."""
        self.quitting = True
        return ""
