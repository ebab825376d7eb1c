"""The debugger's commands: how they are declared, found and explained."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from specscope.debug.breakpoints import EventKind
from specscope.errors import UserError
from specscope.gone import refuse_gone
from specscope.plans.kinds import RUN_HERE
from specscope.trace.checked import short

Method = TypeVar("Method", bound=Callable[..., Any])


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
    ("accept=NODE", "accept node NODE of this step"),
    ("reject=NODE", "reject node NODE of this step"),
    ("coin=NODE:COIN", "set the coin of node NODE of this step, between 0 and 1"),
    ("token=ID", "end this step with the token ID"),
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
COMMANDS: list[ConsoleCommand] = []


def command(usage: str = "", **about: Any) -> Callable[[Method], Method]:  # noqa: ANN401
    """Make a method do_NAME a command; its docstring is the help. Where it stands, `{events}` lists all events."""

    def declared(method: Method) -> Method:
        text = " ".join((method.__doc__ or "").split()).removesuffix(".").replace("{events}", EVENTS)
        name = method.__name__.removeprefix("do_").replace("_", "-")
        COMMANDS.append(ConsoleCommand(name, usage, text[:1].lower() + text[1:], **about))
        return method

    return declared


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


HEAD, WIDTH = 26, 73  # cells of the heads beside which help stands, and of a line


def help_all() -> str:
    hints = (
        "A name may be cut short as long as it is unique: cont, wat.",
        f"An empty line repeats {', '.join(c.name for c in COMMANDS if c.repeats)}.",
        f"{' and '.join(f'help {c.name}' for c in COMMANDS if c.takes)} say more.",
    )
    return "\n".join([*(beside(command.head, command.help) for command in COMMANDS), "", *hints])


def help_of(command: ConsoleCommand) -> str:
    """One command, and all that may follow its name."""
    lines = [command.head, *textwrap.wrap(command.help, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join([*lines, *(beside(f"  {usage}", what) for usage, what in command.takes)])


def beside(head: str, text: str) -> str:
    """Help beside its head; below it where the head is long."""
    lines = textwrap.wrap(text, WIDTH - HEAD)
    first = [head] if len(head) > HEAD - 2 else [f"{head:<{HEAD}}{lines.pop(0)}"]
    return "\n".join([*first, *(" " * HEAD + line for line in lines)])
