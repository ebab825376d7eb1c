"""`specscope verify`: put a capture on trial."""

from __future__ import annotations

import sys
from typing import Annotated

import click
from msgspec import Meta

from specscope.cli.captures import need_steps, print_json, read_branch, text_console
from specscope.cli.numbers import Number, whole_from

Share = Annotated[float, Meta(gt=0, lt=1, description="above 0 and below 1")]


@click.command()
@click.argument("file", metavar="CAPTURE")
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
@click.option(
    "--alpha",
    type=Number(Share),
    default=0.01,
    show_default=True,
    metavar="P",
    help="How often a run without a fault may fail the statistical checks, all together.",
)
@click.option("--branch", type=whole_from(0, 2**31), metavar="N", help="Judge this branch.  [default: the last]")
def verify(file: str, *, as_json: bool, alpha: float, branch: int | None) -> None:
    """Check from CAPTURE alone that the run is consistent and lossless.

    No model is needed. Each step's verdict is recomputed from the recorded numbers. Positions, tokens and KV blocks are
    tracked from step to step. Over the whole run, what was accepted and drawn is tested against the recorded
    probabilities. Each statistical check that passes shows the smallest bias it would have seen.

    Exit code: 0 consistent, 1 not consistent, 2 cannot be judged.
    """
    from specscope.analyze.verify.text import render_trial
    from specscope.analyze.verify.trial import judge

    reader = read_branch(file, branch)
    need_steps(reader.history, file)
    trial = judge(reader.history, source=file, alpha=alpha, warnings=reader.warnings)
    if as_json:
        print_json(trial.to_dict())
    else:
        render_trial(trial, text_console())
    sys.exit(int(trial.exit))
