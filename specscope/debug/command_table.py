"""The debugger's commands: their names, arguments and help."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from specscope.debug.events import EventKind
from specscope.errors import UserError
from specscope.gone import refuse_gone
from specscope.plans.kinds import RUN_HERE
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
    looks: bool = False  # whether it is about the step in view, which may be an earlier one than the engine stands at
    takes: tuple[tuple[str, str], ...] = ()  # what may follow the name, each with its help

    @property
    def method(self) -> str:
        """The method of Commands that runs it."""
        return "do_" + self.name.replace("-", "_")

    @property
    def head(self) -> str:
        """`continue, c`, and what follows the name."""
        return f"{', '.join((self.name, *self.short))} {self.usage}".rstrip()


FORK_PARAMS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens"),
)
FORK_TAKES = (
    ("temperature=0.7", f"another sampling parameter; also {', '.join(FORK_PARAMS[1:])}"),
    ("drafter=NAME", f"another drafter: {', '.join(RUN_HERE)} or none"),
    ("draft_model=MODEL", "another draft model or head"),
    ("tree=TREE", "another draft tree: 5, 3x5, top:3x5, dynamic:24, ..."),
    ("rule=RULE", "another rule of verification: standard, block, traversal or match"),
    ("accept=NODE", "accept node NODE of this step, whatever its coin"),
    ("reject=NODE", "reject node NODE of this step, whatever its coin"),
    ("coin=NODE:COIN", "give node NODE of this step another coin, a number between 0 and 1"),
    ("token=ID", "end this step with the token ID"),
    ("drop=N", "drop the last N tokens of the context"),
    ("tail=TEXT", "append TEXT to the context, after drop=N if both are given; write tail='a text' if it has spaces"),
    ("tokens=N", "compare N output tokens (default: 64)"),
)
INFO_TAKES = (
    ("breakpoints", "the breakpoints, and how often each was hit"),
    ("requests", "the requests up to this step, with their acceptance lengths"),
    ("branches", "the branches of the run"),
    ("step", "this step's phases and batch"),
    ("kv", "the KV blocks in use, and what this step wrote and moved"),
    ("drafter", "the drafter, the layers that feed it, its cache and its passes in this step"),
    ("names", "the fields that EXPR can use"),
)
EVENTS = " ".join(kind.value for kind in EventKind)
COMMANDS = (
    ConsoleCommand("continue", "", "run to the next breakpoint, or to the end of the run", ("c",)),
    ConsoleCommand("next", "[COUNT]", "run one engine step, or COUNT of them", ("n",), repeats=True),
    ConsoleCommand(
        "pause", "", "in vLLM or specscope serve: stop at the next step; Ctrl-C does so while a command waits"
    ),
    ConsoleCommand(
        "step", "[COUNT]", "run one phase, or COUNT: schedule, draft, forward, verify, commit", ("s",), repeats=True
    ),
    ConsoleCommand("finish", "[REQUEST]", "run until REQUEST ends (default: the current request)", ("fin",)),
    ConsoleCommand("until", "EXPR", "run until EXPR is true for a step of any request", ("u",)),
    ConsoleCommand("reverse-continue", "", "go back to the previous breakpoint", ("rc",)),
    ConsoleCommand("reverse-next", "[COUNT]", "go back one engine step, or COUNT of them", ("rn",), repeats=True),
    ConsoleCommand(
        "goto",
        "STEP|NAME[@N]|start|end",
        "go to just after STEP, or step N of request NAME (NAME alone chooses it), or before the first, or the last",
    ),
    ConsoleCommand("break", "EVENT [if EXPR]", f"stop at EVENT (if EXPR is true): {EVENTS}", ("b",), passive=True),
    ConsoleCommand("watch", "EXPR", "stop when EXPR becomes true or false for a request", passive=True),
    ConsoleCommand(
        "delete",
        "[N|EVENT ...]",
        "delete breakpoints N ..., those at EVENT ..., or all of them",
        ("d", "clear"),
        passive=True,
    ),
    ConsoleCommand(
        "commands",
        "N [LINE; ...]",
        "run these lines at each stop of breakpoint N; without any, type them one by one, then end",
        passive=True,
    ),
    ConsoleCommand(
        "info",
        "breakpoints|requests|branches|step|kv|drafter|names",
        "show one of these",
        ("i",),
        passive=True,
        looks=True,
        takes=INFO_TAKES,
    ),
    ConsoleCommand(
        "print",
        "EXPR [@ NODE]",
        "show the value of EXPR at NODE (default: the current node, else the step)",
        ("p",),
        looks=True,
    ),
    ConsoleCommand(
        "check",
        "kv",
        "compare the KV that target and drafter hold of the current request with KV computed afresh",
    ),
    ConsoleCommand("tree", "", "draw the step's tree with its verdicts", ("t",), looks=True),
    ConsoleCommand(
        "node",
        "[N]",
        "show all evidence on node N (default: the current node) and make it the current node",
        looks=True,
    ),
    ConsoleCommand(
        "why", "[N]", "say why node N was rejected or kept; without N, the step's path and what ended it", looks=True
    ),
    ConsoleCommand("where", "", "show the current step, request and node", ("w",), looks=True),
    ConsoleCommand("branch", "N", "show branch N of a recorded run, at its last step"),
    ConsoleCommand("request", "NAME", "make NAME the current request", ("r",), looks=True),
    ConsoleCommand(
        "fork",
        "[NAME=VALUE ...]",
        "what if: run the request again from this step with changes, and compare the two runs",
        looks=True,
        takes=FORK_TAKES,
    ),
    ConsoleCommand("help", "[COMMAND]", "list all commands, or explain one", ("h", "?"), passive=True),
    ConsoleCommand("quit", "", "leave the debugger", ("q", "exit")),
)


def find(name: str) -> ConsoleCommand:
    """A command by its name, its short name or a unique prefix. Raises UserError."""
    exact = [c for c in COMMANDS if name == c.name or name in c.short]
    matches = exact or [c for c in COMMANDS if c.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{short(name)} is ambiguous: {', '.join(c.name for c in matches)}")
    refuse_gone(f"the command {name}")
    raise UserError(f"unknown command {short(name)}: help lists all commands")


HINTS = (
    "A name may be cut short as long as it is unique: cont, wat.",
    f"An empty line repeats {', '.join(c.name for c in COMMANDS if c.repeats)}.",
    f"{' and '.join(f'help {c.name}' for c in COMMANDS if c.takes)} say more.",
)
HEAD, WIDTH = 26, 73  # cells of the heads beside which help stands, and of a line


def help_all() -> str:
    """All commands with their short names, usage and help."""
    return "\n".join([*(beside(command.head, command.help) for command in COMMANDS), "", *HINTS])


def help_of(command: ConsoleCommand) -> str:
    """One command, and all that may follow its name."""
    lines = [command.head, *textwrap.wrap(command.help, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join([*lines, *(beside(f"  {usage}", what) for usage, what in command.takes)])


def beside(head: str, text: str) -> str:
    """Help beside its head; below it where the head is long."""
    lines = textwrap.wrap(text, WIDTH - HEAD)
    first = [head] if len(head) > HEAD - 2 else [f"{head:<{HEAD}}{lines.pop(0)}"]
    return "\n".join([*first, *(" " * HEAD + line for line in lines)])
