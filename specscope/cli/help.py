"""The verbs in groups with an example each, and `specscope help VERB`."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import click
from click.shell_completion import CompletionItem

from specscope.errors import UserError
from specscope.gone import refuse_gone

GROUPS = {
    "Look": ("run", "capture", "replay", "report", "why", "export", "watch", "tui"),
    "Judge": ("verify", "diagnose", "audit", "locate", "compare"),
    "Change": ("debug", "tune", "tree"),
    "Serve": ("serve", "vllm", "transformers"),
    "Develop": ("doctor", "help"),
}
NAME = 14  # columns of a verb's name


def examples(command: click.Command) -> list[str]:
    """The commands that its help shows, without their comments."""
    text = inspect.cleandoc(command.help or "")
    lines = (line.removeprefix("  ") for line in text.splitlines() if line.startswith("  "))
    return [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("specscope ")]


class GroupedVerbs(click.Group):
    """Commands whose help lists them by group, what each does and its first example."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but for a verb that there was."""
        if args[0] not in self.commands:
            refuse_gone(args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A section for each group."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                for name in names:
                    if name in self.commands:
                        self._write(name, self.commands[name], formatter)

    def _write(self, name: str, command: click.Command, formatter: click.HelpFormatter) -> None:
        indent = " " * formatter.current_indent
        room = formatter.width - formatter.current_indent - NAME
        about = textwrap.wrap(command.get_short_help_str(200), room)
        for index, line in enumerate(about):
            formatter.write(f"{indent}{'' if index else name:<{NAME}}{line}\n")
        shown = [example for example in examples(command) if example.startswith(f"specscope {name}")]
        for example in shown[:1]:
            formatter.write(f"{indent}{'':<{NAME}}  {example}\n")


def _verbs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = context.find_root().command.commands  # type: ignore[attr-defined]
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


@click.command("help")
@click.argument("words", nargs=-1, metavar="[VERB]", shell_complete=_verbs)
@click.pass_context
def help_verb(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of VERB.

    \b
      specscope help report
    """
    shown: Any = context.find_root()
    for word in words:
        if not isinstance(shown.command, click.Group):
            raise UserError(f"{shown.command_path} has no verb {word}: see {shown.command_path} --help")
        name, command, _ = shown.command.resolve_command(shown, [word])
        assert command is not None  # otherwise it has raised
        shown = click.Context(command, info_name=name, parent=shown)
    click.echo(shown.get_help())
