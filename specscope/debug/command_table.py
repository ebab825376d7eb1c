"""The debugger's commands by name: what they are called, what follows the name, and their help."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.debug.events import EventKind
from specscope.errors import UserError
from specscope.trace.checked import short


@dataclass(frozen=True)
class ConsoleCommand:
    """One command. `Commands.do_NAME` runs it, with underscores for hyphens."""

    name: str
    usage: str  # what follows the name
    help: str
    short: tuple[str, ...] = ()
    repeats: bool = False  # whether an empty line runs it again
    passive: bool = False  # whether it neither moves a run nor looks at where it stands: a running engine runs on

    @property
    def method(self) -> str:
        """The method of Commands that runs it."""
        return "do_" + self.name.replace("-", "_")


EVENTS = " ".join(kind.value for kind in EventKind)
COMMANDS = (
    ConsoleCommand("continue", "", "run to the next breakpoint, or to the end of the run", ("c",)),
    ConsoleCommand("run", "", "go back to the start and run to the first breakpoint"),
    ConsoleCommand("next", "[COUNT]", "run one engine step, or COUNT of them", ("n",), repeats=True),
    ConsoleCommand(
        "step", "[COUNT]", "run one phase, or COUNT: schedule, draft, forward, verify, commit", ("s",), repeats=True
    ),
    ConsoleCommand("finish", "[REQUEST]", "run until REQUEST, or else the current request, ends", ("fin",)),
    ConsoleCommand("until", "EXPR", "run until EXPR is true for the step of any request", ("u",)),
    ConsoleCommand("reverse-continue", "", "go back to the previous breakpoint", ("rc",)),
    ConsoleCommand("reverse-next", "[COUNT]", "go back one engine step, or COUNT of them", ("rn",), repeats=True),
    ConsoleCommand("reverse-step", "", "go back one phase", ("rs",), repeats=True),
    ConsoleCommand("goto", "STEP|start|end", "go to just after STEP, before the first step, or after the last"),
    ConsoleCommand("break", "EVENT [if EXPR]", f"stop at EVENT (if EXPR is true): {EVENTS}", ("b",), passive=True),
    ConsoleCommand("tbreak", "EVENT [if EXPR]", "like break, but deleted after its first stop", ("tb",), passive=True),
    ConsoleCommand("watch", "EXPR", "stop when EXPR becomes true or false for a request", passive=True),
    ConsoleCommand("ignore", "N COUNT", "skip the next COUNT hits of breakpoint N", passive=True),
    ConsoleCommand("enable", "[N ...]", "enable breakpoints N ..., or all of them", passive=True),
    ConsoleCommand("disable", "[N ...]", "disable breakpoints N ..., or all of them", passive=True),
    ConsoleCommand("delete", "[N ...]", "delete breakpoints N ..., or all of them", ("d",), passive=True),
    ConsoleCommand(
        "commands",
        "N [LINE; ...]",
        "run LINE; ... at each stop of breakpoint N; without LINE, the lines that follow, up to end",
        passive=True,
    ),
    ConsoleCommand(
        "info",
        "breakpoints|requests|branches|step|kv|names",
        "show one of these; names: the fields that EXPR can use",
        ("i",),
        passive=True,
    ),
    ConsoleCommand(
        "print", "EXPR [@ NODE]", "show the value of EXPR at NODE, else at the current node or step", ("p",)
    ),
    ConsoleCommand("tree", "", "draw the step's tree with its verdicts", ("t",)),
    ConsoleCommand(
        "node", "[N]", "show everything about node N, which becomes the current node, or about the current node"
    ),
    ConsoleCommand("up", "", "make the parent the current node"),
    ConsoleCommand("down", "", "make the accepted child the current node, or the first child if none was accepted"),
    ConsoleCommand("where", "", "show the current step, request and node", ("w",)),
    ConsoleCommand("branch", "N", "show branch N of a recorded run, at its last step"),
    ConsoleCommand("request", "NAME", "make NAME the current request", ("r",)),
    ConsoleCommand(
        "fork",
        "[NAME=VALUE ...]",
        "run the request again from this step with changes, such as reject=NODE, and compare",
    ),
    ConsoleCommand("help", "[COMMAND]", "list all commands, or explain one", ("h", "?"), passive=True),
    ConsoleCommand("quit", "", "leave the debugger", ("q", "exit")),
)


def find(name: str) -> ConsoleCommand:
    """A command by its name, its short name or a unique prefix. Raises UserError."""
    exact = [c for c in COMMANDS if name == c.name or name in c.short]
    found = exact or [c for c in COMMANDS if c.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{short(name)} is ambiguous: {', '.join(c.name for c in found)}")
    raise UserError(f"unknown command {short(name)}: help lists all commands")
