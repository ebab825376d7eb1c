"""`specscope verify`: check a capture for consistency and losslessness."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta
from rich.text import Text

from specscope.analyze.verify.text import render_check, render_trial
from specscope.analyze.verify.trial import judge
from specscope.cli.arguments import X_RULE, Number
from specscope.cli.captures import captures_argument, judge_each, need_steps, read_branch, source_options
from specscope.cli.help import verb
from specscope.cli.options import branch_option, flag, json_option
from specscope.cli.streams import warn
from specscope.engine.config import load_rule
from specscope.envelope import of_capture
from specscope.errors import UserError
from specscope.speculate.named import NamedCode
from specscope.terminal import text_console
from specscope.testing.calls import judge_calls, read_calls
from specscope.trace.kinds import ARRAYS, TENSORS, kind_of, start_of
from specscope.trace.record.vocabulary import printable

Share = Annotated[float, Meta(gt=0, lt=1, description="above 0 and below 1")]
MOST_SHOWN = 10  # calls whose outputs are impossible


@verb(epilog=X_RULE)
@captures_argument
@json_option
@flag(
    "--alpha P",
    "Chance that a run without a fault fails. Of all statistical checks together.",
    Number(Share),
    default=0.01,
)
@flag(
    "--rule RULE",
    "Rule of the run, if it is your own. As module:function; for calls: standard, match, block or greedy.",
)
@branch_option
@source_options
def verify(captures: tuple[str, ...], *, as_json: bool, alpha: float, rule: str | None, branch: int | None) -> None:
    """Check that a run is consistent and lossless, from its capture alone.

    \b
      specscope verify run.jsonl
      specscope verify run*.jsonl      one by one
      specscope verify call.npz        calls of a sampler: p, q, drafted, output, coin

    No model is needed. It recomputes each step's verdict from the recorded numbers, tracks positions, tokens and KV
    blocks from step to step, and tests over the whole run whether the accepted and drawn tokens fit the recorded
    probabilities. Each statistical check that passes shows the smallest bias it would have seen.

    Exit code: 0 consistent, 1 not consistent, 2 cannot be judged. For several captures, 1 beats 2 and 2 beats 0.
    """

    def judged(file: str) -> Mapping[str, Any]:
        if kind_of(start_of(file)) in (ARRAYS, TENSORS):
            if branch is not None:
                raise UserError(f"{printable(file)} is no capture and has no branches: leave out --branch")
            return judge_file(file, rule, alpha, as_json=as_json)
        own_rule = None if rule is None else load_rule(rule, NamedCode.find(rule, "--rule"))
        reader = read_branch(file, branch)
        need_steps(reader.history, file)
        trial = judge(reader.history, source=file, alpha=alpha, warnings=reader.warnings, own_rule=own_rule)
        if not as_json:
            render_trial(trial, text_console())
        return of_capture(file, trial.to_dict(), code=trial.exit, warnings=trial.notes)

    sys.exit(judge_each("verify", captures, judged, as_json=as_json))


def judge_file(file: str, rule: str | None, alpha: float, *, as_json: bool) -> Mapping[str, Any]:
    """Judge the calls of a sampler in a file of arrays. Raises UserError."""
    calls, notes = read_calls(file)
    found = judge_calls(calls, rule, alpha)
    if not as_json:
        console = text_console()
        for note in notes:
            warn(note)
        for check in found.checks:
            render_check(check, file, console)
        for number, words in found.impossible[1:MOST_SHOWN]:
            console.print(Text(f"    call {number}: {words}"), soft_wrap=True)
        if found.fits:
            for name, words in found.refuted.items():
                console.print(Text(f"not {name}: {words}"), soft_wrap=True)
        console.print(Text(f"\n{found}", style="bold" if found.fits else "bold red"), soft_wrap=True)
    return of_capture(file, found.to_dict(), code=found.exit, warnings=notes)
