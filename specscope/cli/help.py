"""The help of a verb: the usual flags in a line each, or all by group."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict
from functools import partial
from itertools import pairwise
from typing import Any

import click

from specscope.cli.captures import print_json, read_sources
from specscope.cli.options import Option
from specscope.envelope import envelope
from specscope.errors import UserError
from specscope.gone import refuse_gone

FLAG = 24  # columns of a flag, at most
ALL = "specscope.cli.help.all"


def examples(command: click.Command) -> list[str]:
    """The commands that its help shows, without their comments."""
    text = inspect.cleandoc(command.help or "")
    lines = (line.removeprefix("  ") for line in text.splitlines() if line.startswith("  "))
    return [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("specscope ")]


def _show_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[ALL] = True
        click.echo(context.get_help())
        context.exit()


HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show all, by group."
)


class Verb(click.Command):
    """A command whose --help shows the usual flags, and whose --help-all shows every flag by group."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, but for a flag with a value that there was."""
        for pair in pairwise(args):
            refuse_gone(" ".join(pair))
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if place := re.search(r"extra argument \(#?(\w+@\d\S*|r\d+)\)", error.message):
                what = "step" if "@" in place[1] else "request"
                ctx.fail(f"{error.message}: a {what} is written FILE#{place[1]}")
            raise

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        """As click does, over captures that were fetched. With --json a refusal prints an envelope too."""
        source = ctx.params.get("captures") or [ctx.params[name] for name in ("place",) if name in ctx.params]
        try:
            if "headers" in ctx.params:
                read_sources(ctx.params)
            return super().invoke(ctx)
        except UserError as error:
            if ctx.params.get("as_json"):
                print_json(envelope(ctx.info_name or "", {"error": str(error)}, source=source, code=2))
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual flags, in a line each where that is wide enough; or all."""
        is_all, groups = ALL in ctx.meta, defaultdict[str, list[tuple[str, str]]](list)
        for param in self.get_params(ctx):
            group, usual = (param.group, param.usual) if isinstance(param, Option) else ("", True)
            record = param.get_help_record(ctx) if is_all or usual else None
            if record is not None and isinstance(param, click.Option):
                groups[f"{group} options".strip().capitalize() if is_all else "Options"].append(record)
        for title, records in groups.items():
            room = formatter.width - 4 - min(FLAG, max(len(flag) for flag, _ in records))
            with formatter.section(title):
                rows = records if is_all else [(flag, _line(about, room)) for flag, about in records]
                formatter.write_dl(rows, col_max=FLAG)


def _line(about: str, room: int) -> str:
    """What a flag does, in a line: all of it, its first sentence, or the beginning of that."""
    first = re.split(r"(?<=[^.][^.][.])\s+(?=[A-Z[])", about)[0]
    return about if len(about) <= room else textwrap.shorten(first, room, placeholder=" …")


verb = partial(click.command, cls=Verb)
