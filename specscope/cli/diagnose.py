"""`specscope diagnose`: name the cause of what is wrong with a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from specscope.cli.captures import need_steps, print_json, read_branch, text_console
from specscope.cli.numbers import whole_from
from specscope.cli.streams import warn
from specscope.errors import UserError

if TYPE_CHECKING:
    from specscope.analyze.audit.options import Options
    from specscope.trace.history import History


@click.command()
@click.argument("file", metavar="CAPTURE")
@click.option("--against", metavar="GOOD", help="A capture of a run without the fault, to be compared with.")
@click.option("--target", metavar="MODEL", help="The target that judges.  [default: the capture's]")
@click.option("--draft-model", metavar="MODEL", help="The drafter's model or EAGLE head.  [default: the capture's]")
@click.option(
    "--sample",
    type=whole_from(1, 2**31),
    default=1000,
    show_default=True,
    metavar="N",
    help="Steps that the models judge, spread over the run.",
)
@click.option("--no-audit", is_flag=True, help="Judge by the capture alone: load no model.")
@click.option("--branch", type=whole_from(0, 2**31), metavar="N", help="Judge this branch.  [default: the last]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diagnose(
    file: str,
    against: str | None,
    target: str | None,
    draft_model: str | None,
    sample: int,
    no_audit: bool,
    branch: int | None,
    as_json: bool,
) -> None:
    """Name what is wrong with the run in CAPTURE, the most likely cause first.

    Runs `verify`, and `audit` if the models are available. If the models disagree with the capture, they are rerun with
    known mistakes, to see which one reproduces it. With --against, also runs `compare`. Each cause comes with the
    figures for and against it, and a command that shows an example.

    Exit code: 0 nothing wrong was found, 1 something was, 2 cannot be judged.
    """
    from specscope.analyze.diagnose.run import examine

    reader = read_branch(file, branch)
    need_steps(reader.history, file)
    good = None if against is None else read_branch(against, None)
    if good is not None:
        need_steps(good.history, str(against))
    options, why = None, "audit: --no-audit was given"
    if not no_audit:
        options, why = _options(reader.history, target, draft_model, sample)
    from specscope.cli.audit import progress_bar

    with progress_bar() as progress:
        found = examine(
            reader.history,
            file,
            options,
            good=None if good is None else good.history,
            why_no_models=why,
            warnings=reader.warnings,
            progress=progress,
        )
    if as_json:
        print_json(found.to_dict(file))
    else:
        from specscope.analyze.diagnose.text import render_diagnosis

        render_diagnosis(found, file, text_console())
    for warning in reader.warnings:
        warn(warning)
    sys.exit(int(found.exit))


def _options(history: History, target: str | None, draft: str | None, sample: int) -> tuple[Options | None, str]:
    """The models that judge; or why there are none, where nobody named one. Raises UserError for one that was named."""
    from specscope.cli.judges import audit_options
    from specscope.live.start import share_cores

    share_cores()
    from specscope.model.quiet import hush

    hush(gguf=True)
    try:
        options = audit_options(history, target, draft, sample)
    except UserError as error:
        if target is not None or draft is not None:
            raise
        return None, f"audit: {error}"
    return options, options.why_no_draft and f"audit of the drafter: {options.why_no_draft}"
