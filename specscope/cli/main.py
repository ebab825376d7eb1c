"""The `specscope` command: its verbs in groups, each with an example."""

from __future__ import annotations

import os
import textwrap
from collections import UserDict
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from typing import Any

import click

import specscope
from specscope.cli.help import examples
from specscope.errors import UserError
from specscope.gone import refuse_gone
from specscope.trace.record.vocabulary import shell_word

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
GROUPS = {  # of verbs, and the module of each
    "Make": {"run": "run", "capture": "run", "serve": "serve", "vllm": "inside", "transformers": "inside"},
    "Look": {"open": "report", "watch": "watch", "report": "report", "why": "report", "export": "export"},
    "Judge": {"verify": "diagnose", "diagnose": "diagnose", "compare": "report"},
    "Change": {"debug": "run", "tune": "tune", "tree": "tune"},
    "Machine": {"doctor": "doctor"},
}
HOMES = dict(chain.from_iterable(verbs.items() for verbs in GROUPS.values()))
OTHERS = {"diff": "compare", "explain": "why", "show": "open", "view": "open", "check": "verify", "record": "capture"}
NAME = 14  # columns of a verb's name


class Verbs(UserDict[str, Any]):
    """The verbs by name. Each is imported when it is asked for: not every installation has what all of them need."""

    def __getitem__(self, name: str) -> click.Command:
        module = vars(import_module(f"specscope.cli.{HOMES[name]}"))
        return next(each for each in module.values() if isinstance(each, click.Command) and each.name == name)


class GroupedVerbs(click.Group):
    """Commands whose help lists them by group, what each does and its first example."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but for a verb that there was, one of another tool, and a file in the place of a verb."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            refuse_gone(args[0])
            close = OTHERS.get(args[0]) or next(iter(get_close_matches(args[0], HOMES)), None)
            if os.path.exists(args[0]):
                raise UserError(f"no verb was given: specscope open {shell_word(args[0])} shows it")
            if close is not None:
                ctx.fail(f"No such command {args[0]!r}: did you mean {close}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in GROUPS.items():
            with formatter.section(title):
                indent, room = " " * formatter.current_indent, formatter.width - formatter.current_indent - NAME
                for name in names:
                    about = textwrap.wrap(self.commands[name].get_short_help_str(200), room)
                    shown = [one for one in examples(self.commands[name]) if one.startswith(f"specscope {name}")]
                    for index, line in enumerate([*about, *(f"  {example}" for example in shown[:1])]):
                        formatter.write(f"{indent}{'' if index else name:<{NAME}}{line}\n")


@click.group(
    cls=GroupedVerbs, commands=Verbs(dict.fromkeys(HOMES)), context_settings=CONTEXT, invoke_without_command=True
)
@click.version_option(specscope.__version__, "-V", "--version", prog_name="specscope")
@click.pass_context
def cli(context: click.Context) -> None:
    """The debugger for speculative decoding.

    Watch a model draft and verify, token by token. Capture every decision with its evidence, then open it, report on
    it, or send it to Jaeger. `specscope VERB --help` explains a verb.

    \b
      Why is my acceptance low?        specscope diagnose run.jsonl
      Did it fall since yesterday?     specscope compare BEFORE AFTER (logs too)
      When did it fall, in one log?    specscope report server.log
      Does my sampler sample right?    specscope verify run.jsonl
      Why was this token rejected?     specscope why run.jsonl#r3@17
      What is in this Jaeger trace?    specscope open URL (or its download)
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
