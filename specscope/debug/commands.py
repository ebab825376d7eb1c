"""The commands of the debugger, as they are typed: gdb's and pdb's names, unique prefixes, help for each.

`Commands.run(line)` gives the lines to show. The console, the screen's prompt and scripts all use it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specscope.debug import show
from specscope.debug.events import EventKind, Evidence, names_of, types_of
from specscope.debug.expressions import Expression
from specscope.debug.forked import Forked
from specscope.debug.session import Session, Stop
from specscope.errors import UserError
from specscope.trace.checked import short, whole
from specscope.trace.vocabulary import printable
from specscope.trace.wording import plural

MOST_COMMANDS = 10_000  # of breakpoints, run for one line that was typed
MOST_COUNT = 10**9


@dataclass(frozen=True)
class Command:
    """One command."""

    name: str
    usage: str  # what follows the name
    help: str
    run: Callable[[Commands, str], str]
    short: tuple[str, ...] = ()
    repeats: bool = False  # whether an empty line runs it again


class WhatIf:
    """What `fork` asks for; an engine in this process has one (engine/whatif.py)."""

    def fork(self, session: Session, words: Sequence[str]) -> Forked:
        """Run a fork and compare it with the original. Raises UserError."""
        raise UserError("forks need a live engine in this process: specscope debug")

    def node(self, session: Session, node: int) -> str:
        """Distributions at a node. Raises UserError."""
        raise UserError("distributions are only there with a live engine: specscope debug")


class Commands:
    """A debugger that is spoken to in lines."""

    def __init__(self, session: Session, what_if: WhatIf | None = None, *, many_lines: bool = True) -> None:
        """`many_lines`: whether `commands N` may take the lines that follow, up to `end`."""
        self.session = session
        self.many_lines = many_lines
        self.what_if = what_if or WhatIf()
        self.quitting = False
        self.forked: Forked | None = None  # the last fork, for a screen to show both sides
        self._last = ""
        self._pending: list[str] = []  # commands of breakpoints that stopped, still to be run
        self._draining = False
        self._for: int | None = None  # the breakpoint whose commands are being read
        self._lines: list[str] = []

    def run(self, line: str) -> str:
        """Obey one line; what to show. Raises UserError for a line that cannot be obeyed, and changes nothing then."""
        line = " ".join(line.splitlines())  # pasted text may have ends of lines in it
        said = self._note(line) if self._for is not None else self._obey(line)
        return printable(said, keep="\n")  # it may tell of what others wrote

    def _obey(self, line: str) -> str:
        line = self._meant(line)
        if not line:
            return ""
        name, _, rest = line.partition(" ")
        command = find(name)
        self._last = line if command.repeats else ""
        return command.run(self, rest.strip())

    def _meant(self, line: str) -> str:
        """The line without what is no command: an empty one repeats the last where that repeats."""
        line = line.strip()
        return "" if line.startswith("#") else line or self._last

    def is_passive(self, line: str) -> bool:
        """Whether a line neither moves the run nor looks at where it stands. Raises UserError for no command."""
        meant = "" if self._for is not None else self._meant(line)
        return not meant or find(meant.split()[0]).name in PASSIVE

    def complete(self, line: str) -> list[str]:
        """What a line may go on with: commands, events, names of the evidence."""
        head, _, last = line.rpartition(" ")
        if not head:
            return sorted(c.name for c in COMMANDS if c.name.startswith(line))
        words = head.split()
        if words[0] in ("b", "break", "tb", "tbreak") and len(words) == 1:
            return [kind.value for kind in EventKind if kind.value.startswith(last)]
        if words[0] in ("help", "h") and len(words) == 1:
            return sorted(c.name for c in COMMANDS if c.name.startswith(last))
        return sorted(name for name in names_of(EventKind.REJECT) if name.startswith(last))

    @property
    def reading(self) -> bool:
        """Whether the next lines are commands of a breakpoint, up to `end`."""
        return self._for is not None

    def _note(self, line: str) -> str:
        assert self._for is not None
        if line.strip() == "end":
            self.session.breakpoints.get(self._for).commands = tuple(self._lines)
            self._for, self._lines = None, []
        elif line.strip():
            find(line.split()[0])
            self._lines.append(line.strip())
        return ""

    # What happened

    def stopped(self, stop: Stop) -> str:
        """A stop: why, where, and what the breakpoints' commands say."""
        lines = [stop.describe(), show.where(self.session)]
        if stop.reason == "interrupted":
            self._pending.clear()
        if stop.hits:
            hit = stop.hits[0]
            self.session.request = hit.request
            lines[1] = show.where(self.session, hit.node)
            self._pending[:0] = [command for hit in stop.hits for command in hit.commands]
            if not self._draining:
                lines += self._drain()
        return "\n".join(line for line in lines if line)

    def _drain(self) -> Iterator[str]:
        """Run what breakpoints ask for. They may run on and stop again, so it is a loop, and one with an end."""
        self._draining = True
        try:
            for _ in range(MOST_COMMANDS):
                if not self._pending or self.quitting:
                    return
                yield self._told(self._pending.pop(0))
            if self._pending:
                yield f"breakpoints have run {MOST_COMMANDS} commands without an end: stopped here"
        finally:
            self._pending, self._draining = [], False

    def _told(self, line: str) -> str:
        """What a breakpoint's command says; one that cannot be obeyed says why, and the next is run."""
        try:
            return self._obey(line)
        except UserError as error:
            return f"{line}: {error}"

    def _count(self, text: str) -> int:
        if not text:
            return 1
        count = whole(text)
        if count is None or not 1 <= count <= MOST_COUNT:
            raise UserError(f"how many? {short(text)} is no number from 1 to {MOST_COUNT}")
        return count

    def next(self, text: str) -> str:
        """Engine steps forward."""
        return self.stopped(self.session.next(self._count(text)))

    def step(self, text: str) -> str:
        """Phases forward."""
        stop = Stop("step")
        for _ in range(self._count(text)):
            stop = self.session.step()
            if stop.hits or stop.reason == "end":
                break
        return stop.text + "\n" + show.begun(self.session) if stop.reason == "phase" else self.stopped(stop)

    def reverse_next(self, text: str) -> str:
        """Engine steps back."""
        return self.stopped(self.session.reverse_next(self._count(text)))

    def reverse_step(self, text: str) -> str:
        """A phase back."""
        stop = self.session.reverse_step()
        return stop.text + "\n" + show.begun(self.session) if stop.reason == "phase" else self.stopped(stop)

    def goto(self, text: str) -> str:
        """Be after a step, by its number."""
        number = whole(text)
        if number is None:
            raise UserError("goto which step? write goto 17")
        steps = self.session.history.steps
        at = next((i for i, record in enumerate(steps) if record.step == number), None)
        if at is None:
            first = steps[0].step if steps else 0
            at = number - first
            if self.session.engine is None or at < 0:
                known = f"{first} to {steps[-1].step}" if steps else "none"
                raise UserError(f"there is no step {text}; there are: {known}")
        return self.stopped(self.session.goto(at))

    def breakpoint(self, text: str, *, temporary: bool = False) -> str:
        """`EVENT [if EXPR]`."""
        event, _, condition = text.partition(" ")
        condition = condition.strip()
        if condition and not condition.startswith("if "):
            raise UserError(f"write break {event} if {condition}")
        point = self.session.breakpoints.add(event, condition.removeprefix("if ").strip(), temporary=temporary)
        return f"breakpoint {point.number}: {point.describe()}"

    def watch(self, text: str) -> str:
        """A condition whose change stops."""
        point = self.session.breakpoints.watch(text.removeprefix("if ").strip())
        return f"breakpoint {point.number}: {point.describe()}"

    def numbers(self, text: str) -> list[int]:
        """Numbers of breakpoints."""
        found: list[int] = []
        for word in text.replace(",", " ").split():
            number = whole(word)
            if number is None:
                raise UserError(f"{short(word)} is not the number of a breakpoint")
            found.append(number)
        return found

    def enable(self, text: str, yes: bool) -> str:
        """Switch breakpoints on or off: those of the numbers, or all."""
        points = self.session.breakpoints
        for point in [points.get(n) for n in self.numbers(text)] if text else list(points.points.values()):
            point.enabled = yes
        return ""

    def delete(self, text: str) -> str:
        """Take breakpoints away: those of the numbers, or all."""
        self.session.breakpoints.delete(self.numbers(text) if text else None)
        return ""

    def ignore(self, text: str) -> str:
        """`N COUNT`: let a breakpoint's next hits pass."""
        numbers = self.numbers(text)
        if len(numbers) != 2:
            raise UserError("write ignore N COUNT")
        self.session.breakpoints.get(numbers[0]).ignore = numbers[1]
        return f"breakpoint {numbers[0]} lets its next {plural(numbers[1], 'hit')} pass"

    def commands(self, text: str) -> str:
        """`N`, then lines up to `end`; or `N line; line`."""
        number, _, rest = text.partition(" ")
        numbers = self.numbers(number)
        if len(numbers) != 1 or not (rest or (self.many_lines and not self._draining)):
            raise UserError("write commands N LINE; LINE, with the number of one breakpoint")
        (at,) = numbers
        point = self.session.breakpoints.get(at)
        if rest:
            lines = [line.strip() for line in rest.split(";") if line.strip()]
            for line in lines:
                find(line.split()[0])
            point.commands = tuple(lines)
        else:
            self._for, self._lines = at, []
        return ""

    def info(self, text: str) -> str:
        """Tables."""
        kinds = {
            "breakpoints": show.breakpoints,
            "requests": show.requests,
            "step": show.step,
            "kv": show.kv,
            "names": show.names,
        }
        found = [name for name in kinds if text and name.startswith(text)]
        if len(found) != 1:
            raise UserError(f"info about what? {', '.join(kinds)}")
        return kinds[found[0]](self.session)

    def print(self, text: str) -> str:
        """An expression over the step, or over a node: `p EXPR`, `p EXPR @ NODE`."""
        expression, _, node_text = text.partition("@")
        record, part = self.session.record, self.session.part
        if record is None or part is None:
            raise UserError("nothing has run yet")
        node = None
        if node_text.strip():
            node = self.node_number(node_text.strip())
        kind = EventKind.REJECT if node is not None else EventKind.STEP
        compiled = Expression(expression, types_of(kind))
        value = compiled.value(Evidence(record, part.request, part, self.session.history, node))
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    def node_number(self, text: str) -> int:
        """A node of the chosen request's step."""
        part = self.session.part
        number = whole(text)
        if part is None or number is None or number >= len(part.tree):
            raise UserError(
                f"there is no node {text[:20]}; nodes are numbered 0 to {len(part.tree) - 1 if part else 0}"
            )
        return number

    def node(self, text: str) -> str:
        """All that is known of a node."""
        if self.session.phase:  # a step was begun: its tree is not judged yet
            begun = whole(text)
            if begun is None:
                raise UserError("node which? write node 0")
            return "of the step that was begun:\n" + self.what_if.node(self.session, begun)
        number = self.node_number(text)
        try:
            deeper = self.what_if.node(self.session, number)
        except UserError as error:
            deeper = str(error)
        return show.node(self.session, number) + "\n" + deeper

    def choose(self, text: str) -> str:
        """The request that commands are about."""
        if text not in self.session.history.requests:
            raise UserError(
                f"there is no request {short(text)}: {', '.join(self.session.history.requests) or 'none yet'}"
            )
        self.session.request = text
        return show.where(self.session)

    def fork(self, text: str) -> str:
        """What if."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"{error}: quotes come in pairs") from error
        self.forked = self.what_if.fork(self.session, words)
        return self.forked.describe(self.session.history.vocabulary)

    def help(self, text: str) -> str:
        """All commands, or one."""
        if text:
            command = find(text)
            also = f"  (also {', '.join(command.short)})" if command.short else ""
            return f"{command.name} {command.usage}".rstrip() + f"{also}\n  {command.help}"
        width = max(len(f"{c.name} {c.usage}") for c in COMMANDS)
        return "\n".join(f"{f'{c.name} {c.usage}':<{width}}  {c.help}" for c in COMMANDS)

    def quit(self, text: str) -> str:
        """Leave."""
        self.quitting = True
        return ""


def _stop(method: Callable[[Session, str], Stop]) -> Callable[[Commands, str], str]:
    """A command that runs the debugger until it stops."""
    return lambda commands, text: commands.stopped(method(commands.session, text))


COMMANDS = (
    Command("continue", "", "go on to the next breakpoint, or the end", _stop(lambda d, t: d.cont()), ("c",)),
    Command("next", "[COUNT]", "run an engine step", Commands.next, ("n",), True),
    Command("step", "[COUNT]", "run a phase: schedule, draft, forward, verify, commit", Commands.step, ("s",), True),
    Command("finish", "[REQUEST]", "go on to the end of a request", _stop(lambda d, t: d.finish(t)), ("fin",)),
    Command("until", "EXPR", "go on until it holds of a request's step", _stop(lambda d, t: d.until(t)), ("u",)),
    Command("reverse-continue", "", "back to the breakpoint before", _stop(lambda d, t: d.reverse_continue()), ("rc",)),
    Command("reverse-next", "[COUNT]", "undo an engine step", Commands.reverse_next, ("rn",), True),
    Command("reverse-step", "", "undo a phase", Commands.reverse_step, ("rs",), True),
    Command("goto", "STEP", "be where that step had just run", Commands.goto),
    Command("break", "EVENT [if EXPR]", "stop at an event", Commands.breakpoint, ("b",)),
    Command("tbreak", "EVENT [if EXPR]", "stop at it once", lambda c, t: c.breakpoint(t, temporary=True), ("tb",)),
    Command("watch", "EXPR", "stop when it changes truth", Commands.watch),
    Command("ignore", "N COUNT", "let a breakpoint's next hits pass", Commands.ignore),
    Command("enable", "[N ...]", "switch breakpoints on", lambda c, t: c.enable(t, True)),
    Command("disable", "[N ...]", "switch breakpoints off", lambda c, t: c.enable(t, False)),
    Command("delete", "[N ...]", "take breakpoints away", Commands.delete, ("d",)),
    Command("commands", "N [LINE; ...]", "what to run when breakpoint N stops; or lines up to end", Commands.commands),
    Command("info", "breakpoints|requests|step|kv|names", "tables", Commands.info, ("i",)),
    Command("print", "EXPR [@ NODE]", "the value of an expression", Commands.print, ("p",)),
    Command("tree", "", "draw the step's judged tree", lambda c, t: show.tree(c.session), ("t",)),
    Command("node", "N", "all that is known of a node", Commands.node),
    Command("where", "", "where the run stands", lambda c, t: show.where(c.session), ("w",)),
    Command("request", "NAME", "the request that commands are about", Commands.choose, ("r",)),
    Command("fork", "[NAME=VALUE ...]", "run the request from this step again with changes, beside it", Commands.fork),
    Command("help", "[COMMAND]", "this", Commands.help, ("h", "?")),
    Command("quit", "", "leave", Commands.quit, ("q", "exit")),
)


# Commands that neither move a run nor look at where it stands: an engine that runs goes on over them.
PASSIVE = {"break", "tbreak", "watch", "ignore", "enable", "disable", "delete", "commands", "info", "help"}


def find(name: str) -> Command:
    """A command by its name, its short name or a unique prefix. Raises UserError."""
    exact = [c for c in COMMANDS if name == c.name or name in c.short]
    found = exact or [c for c in COMMANDS if c.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{short(name)} could be {', '.join(c.name for c in found)}")
    raise UserError(f"there is no command {short(name)}: help lists them")
