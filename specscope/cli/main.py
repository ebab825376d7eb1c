"""The `specscope` command. Imports each part only when its verb runs; ties an engine to its sinks and a screen."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import specscope
from specscope.cli.arguments import DEBUGGED, FIGURES, PLACE, PROMPT, X_RULE, What, whole_from
from specscope.cli.captures import (
    fetches_captures,
    json_option,
    need_different,
    print_json,
    read_branch,
    reads_watched,
)
from specscope.cli.compare import compare
from specscope.cli.doctor import doctor
from specscope.cli.export import export
from specscope.cli.help import GroupedVerbs
from specscope.cli.inside.transformers import transformers
from specscope.cli.inside.vllm import vllm
from specscope.cli.judges.diagnose import diagnose
from specscope.cli.judges.verify import verify
from specscope.cli.judges.why import why
from specscope.cli.options import (
    engine_config,
    engine_options,
    no_clobber_option,
    output_options,
    output_settings,
    refuse_others,
    sampling_options,
    sampling_params,
    without_values,
)
from specscope.cli.serve import serve
from specscope.cli.streams import need_terminal, say, warn
from specscope.cli.tune import tune
from specscope.cli.watch import watch
from specscope.envelope import envelope, of_capture, of_captures
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.plans.plan import LONGEST, translated
from specscope.terminal import text_console
from specscope.trace.checked import decoded
from specscope.trace.files import read_lines
from specscope.trace.record.vocabulary import shell_word
from specscope.trace.stored import as_runs, every_run
from specscope.tree_shape import MAX_NODES

if TYPE_CHECKING:
    from specscope.analyze.compare.failif import FailCondition
    from specscope.analyze.report import Several
    from specscope.engine.prompts import PromptSpec

file_option = click.option(
    "--file", metavar="FILE", help="Read prompts from a file: lines of text, or JSON Lines; - is standard input."
)
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=GroupedVerbs, context_settings=CONTEXT, no_args_is_help=False, invoke_without_command=True)
@click.version_option(specscope.__version__, "-V", "--version", prog_name="specscope")
@click.pass_context
def cli(context: click.Context) -> None:
    """The debugger for speculative decoding.

    Watch a model draft and verify, token by token. Capture every decision with its evidence, then open it, report on
    it, or send it to Jaeger. `specscope VERB --help` explains a verb.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _check_forms(specs: list[PromptSpec]) -> None:
    """Refuse invalid grammars, schemas and expressions before a model is loaded. Raises UserError."""
    if any(spec.params.structured_outputs is not None for spec in specs):
        from specscope.speculate.structured.compiler import check_forms

        check_forms(spec.params.structured_outputs for spec in specs)


def _tell(line: str) -> None:
    say(f"specscope: {line}")


@cli.command()
@click.argument("prompts", nargs=-1, type=PROMPT)
@file_option
@click.option("-o", "--output", metavar="FILE", help="Also capture the run to this file.")
@no_clobber_option
@click.option("--paused", is_flag=True, help="Start paused before the first step.")
@engine_options
@sampling_options
@output_options
@click.pass_obj
def run(
    lifetime: Lifetime,
    /,
    prompts: tuple[str, ...],
    file: str | None,
    output: str | None,
    paused: bool,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Decode prompts on a live screen: every draft tree and verdict.

    \b
      specscope run "Why is the sky blue?"

    Without PROMPTS or --file, press i on the screen to enter one.
    """
    from specscope.cli.run import run_live
    from specscope.engine.prompts import prompt_specs
    from specscope.live.start import check_places

    config = engine_config(flags)
    params, how = sampling_params(flags)
    settings = output_settings(flags, output, (*prompts, file, config.target, config.draft_model))
    with without_values(settings.privacy):
        specs = prompt_specs(prompts, file, params, **how, tell=_tell)
    _check_forms(specs)
    check_places(config)
    need_terminal("specscope capture PROMPTS -o FILE")
    run_live(config, specs, params, settings, lifetime, how=how, paused=paused)


@cli.command(epilog=X_RULE)
@click.argument("given", nargs=-1, metavar="X...", type=DEBUGGED)
@file_option
@click.option("--commands", "script", metavar="FILE", help="Run the commands in FILE (- is standard input), then exit.")
@engine_options
@sampling_options
@fetches_captures
def debug(given: tuple[str, ...], file: str | None, script: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Debug prompts on a live engine, a capture, or a running engine.

    \b
      specscope debug "Why is the sky blue?"
      specscope debug run.jsonl#r3@17           a capture, from that step on
      specscope debug debug.sock                the socket of specscope serve --debug-socket or vllm --debug

    Set breakpoints, step forward and back, try other outcomes. The run starts paused before step 0. Try
    `break reject if p > 0.2`, then `continue`; `help` lists all commands. A script (--commands) runs to its end; the
    exit code is 2 if a command failed.
    """
    from specscope.cli.debug import Script, attached, converse, over_capture

    config = engine_config(flags)
    params, how = sampling_params(flags)
    whole = [x for x in given if What.of(x) in (What.SOCKET, What.RECORDING)]
    if whole:
        x, is_socket = whole[0], What.of(whole[0]) is What.SOCKET
        if len(given) > 1 or file is not None:
            raise UserError(f"{x} is {'a socket' if is_socket else 'a capture'}, so debug takes no prompts with it")
        others = {"given", "script", "headers", "run"}
        refuse_others(x, "is a running engine" if is_socket else "is a capture", others)
    lines = None if script is None else Script.read(script)
    if whole:
        with attached(x) if is_socket else nullcontext(over_capture(x)) as commands:
            converse(commands, lines)
        return
    from specscope.engine.prompts import prompt_specs
    from specscope.live.start import check_places

    specs = prompt_specs(given, file, params, **how, tell=_tell)
    _check_forms(specs)
    if not specs:
        raise UserError("nothing to debug: give a prompt, --file FILE, a capture or a socket")
    check_places(config)
    from specscope.cli.capture import tell_failed
    from specscope.live.local import live_commands

    commands = live_commands(config, specs)
    converse(commands, lines)
    if lines is not None:
        sys.exit(int(tell_failed(commands.session.history)))


@cli.command()
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPTS...", type=PROMPT)
@click.option("-o", "--output", required=True, metavar="FILE", help="The capture to write (OTLP JSON Lines).")
@no_clobber_option
@click.option("--log-stats", is_flag=True, help='Print a "SpecDecoding metrics:" line every 10 s, as vLLM does.')
@click.option("--quiet", is_flag=True, help="Print no progress bar and no summary.")
@engine_options
@sampling_options
@output_options
@click.pass_obj
def capture(
    lifetime: Lifetime,
    /,
    prompts: tuple[str, ...],
    output: str,
    log_stats: bool,
    quiet: bool,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Decode prompts and record every step, without a screen.

    \b
      specscope capture prompts.txt -o run.jsonl

    PROMPTS are files (- is standard input), or prompts: words with spaces, or one plain word. A file holds lines of
    text, or JSON Lines with "prompt" or chat "messages", sampling parameters by name, and any other key as a label that
    reports group by. Ctrl-C ends the run and leaves a valid capture.
    """
    from specscope.cli.capture import capture_run
    from specscope.engine.prompts import prompt_specs

    config = engine_config(flags)
    params, how = sampling_params(flags)
    settings = output_settings(flags, output, (*prompts, config.target, config.draft_model))
    quiet_files = What.WORDS not in map(What.of, prompts) or any(" " in text for text in prompts)
    with without_values(settings.privacy):
        specs = prompt_specs(prompts, None, params, **how, words_are_files=quiet_files, tell=_tell)
    _check_forms(specs)
    sys.exit(capture_run(config, specs, params, settings, lifetime, log_stats=log_stats, quiet=quiet))


@cli.command("open", epilog=X_RULE)
@click.argument("file", metavar="X", type=PLACE)
@fetches_captures
@click.pass_obj
def open_recording(lifetime: Lifetime, file: str) -> None:
    """Show a capture on the same screen as a live run.

    \b
      specscope open run.jsonl
      specscope open run.jsonl#r3@17
      specscope open http://localhost:16686/trace/4f836fc2338be204b3bf1b5f58777b77

    X is a file, or the address of a request's trace in Jaeger or Tempo, copied from the browser. The screen has a time
    slider. X#REQUEST@STEP opens at that step of that request; on the screen, y copies this reference.
    """
    from specscope.debug.viewer import Viewer
    from specscope.trace.wire.reading import CaptureReader, split_reference

    with ends_at_once():
        from specscope.tui.app import run_app

        file, start = split_reference(file)
        reader = CaptureReader(file)
        need_terminal(f"specscope report {shell_word(file)}")
        reader.read(0.1)
    run_app(Viewer.over(reader), lifetime, title=Path(file).name, reference=file, start=start)
    for warning in reader.warnings:
        warn(warning)


@cli.command(epilog=X_RULE)
@click.argument("captures", nargs=-1, required=True, type=FIGURES, metavar="CAPTURE...")
@json_option("Print JSON, with every request.")
@click.option("--branch", type=whole_from(0, 2**31), metavar="N", help="Report on this branch.  [default: the last]")
@click.option("--top", type=whole_from(1, 2**31), metavar="N", help="N rejected tokens.  [default: 10]")
@click.option(
    "--fail-if", metavar="CONDITION", help='Exit with 1 if this holds, e.g. "tau < 1.5".  [figures: compare --help-all]'
)
@reads_watched
@fetches_captures
def report(captures: tuple[str, ...], as_json: bool, branch: int | None, top: int | None, fail_if: str | None) -> None:
    """Print the acceptance figures of a run.

    \b
      specscope report run.jsonl
      specscope report run*.jsonl                                               pooled, then one by one
      specscope report http://localhost:8000/metrics --fail-if "tau < 1.5"      one reading of a server

    Figures are pooled, by position and by request (worst first). Questions over many steps follow: which tokens are
    rejected most, how well the drafter's probability predicts acceptance, when drafts are accepted, and how the drafter
    ranked the target's tokens. Each row names a step: specscope open CAPTURE#REQUEST@STEP opens it. For counts (watch):
    when the level changed, and what the low intervals have in common.
    """
    from specscope.analyze.compare.counts import gate
    from specscope.analyze.report import build_report, several

    need_different(captures)
    reports, warnings = [], []
    for file in (run for capture in as_runs(captures) for run in every_run(capture)):
        reader = read_branch(file, branch)
        reports.append(build_report(reader.history, source=file, warnings=reader.warnings))
        warnings += reader.warnings
    figures, conditions = several(reports), gate(captures, fail_if) if fail_if else ()
    code = int(any(condition.hit for condition in conditions))
    if as_json:
        print_json(_as_json(figures, conditions, code))
        for warning in warnings:
            warn(warning)
    else:
        from specscope.analyze.text import TOP, render_several, render_text

        if len(reports) == 1:
            render_text(reports[0], text_console(), top or TOP)
        else:
            render_several(figures, text_console(), top or TOP)
    for condition in conditions:
        say(f"--fail-if {condition.text}: {condition.detail}")
    sys.exit(code)


def _as_json(reports: Several, conditions: Sequence[FailCondition], code: int) -> dict[str, Any]:
    each = [of_capture(one.source, one.to_dict(), warnings=one.warnings) for one in reports.reports]
    met = {"conditions": [asdict(condition) for condition in conditions]} if conditions else {}
    return of_captures("report", each, code, reports.to_dict() | met, reports.notes)


def _tree_elsewhere(text: str) -> tuple[str, str]:
    """A tree of another program, or of a file of its: as text, and where it is from. Raises UserError."""
    if os.path.isfile(text):
        text = "\n".join(line for _, line in read_lines(text, "the tree", largest=LONGEST))
    if choices := re.search(r"((?:eagle|medusa)_choices)\W{1,4}(\[\s*\[[\[\]\d,\s]*\])", text):
        return choices[2], f"TensorRT-LLM's {choices[1]}"
    if '"tree_adj"' not in text:
        return text, ""
    try:
        children = decoded(text, dict[str, dict[str, list[int]]])["tree_adj"]
    except (ValueError, KeyError):
        raise UserError("cannot read the tree_adj: write each node's children, {'0': [1, 2], '1': [3]}") from None
    queue: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for node, path in queue:  # which grows meanwhile
        queue += [(child, (*path, rank)) for rank, child in enumerate(children.get(str(node), ()))]
        if len(queue) > MAX_NODES + 1:
            raise UserError(f"the tree_adj has a cycle, or more than {MAX_NODES} nodes")
    return str([path for _, path in queue[1:]]), "SAMD's tree_adj"


@cli.command()
@click.argument("tree", metavar="TREE", required=False)
@click.option("--from", "other", metavar="TEXT", help="A tree in another program's notation: a file or text.")
@click.option("--mask/--no-mask", default=True, help="Also draw the attention mask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tree(tree: str | None, other: str | None, *, mask: bool, as_json: bool) -> None:
    """Draw a draft tree, its attention mask and its cost.

    \b
      specscope tree 3x4
      specscope tree --from '{"method": "eagle3", "num_speculative_tokens": 5}'
      specscope tree --from trtllm.yaml

    TREE is written as for --tree:

    \b
      5                           a chain of five
      3x4                         three chains of four
      '[(0,), (1,), (0, 0)]'      any static tree, as paths of child ranks
      sampled:3x4, top:3x4        the same shape: drawn if the request is sampled; always the likeliest tokens
      dynamic:24,depth=6,top=4    EAGLE-2: the best 24 nodes of a search 6 deep and 4 wide

    The tokens of a static tree are sampled if the request is sampled, and are the likeliest ones if it is greedy.

    --from and --tree also read the trees of other programs:

    \b
      '[[0], [1], [0, 0]]'        choices of EAGLE, Medusa and TensorRT-LLM
      '{"method": "eagle3", ...}' vLLM's --speculative-config, also with a command line around it
      3,4,16                      SGLang's steps, top k and draft tokens, or the flags that set them

    --from also takes a file that holds one of these, TensorRT-LLM's eagle_choices, medusa_choices, or SAMD's tree_adj.
    """
    from specscope.plans.plan import parse_plan
    from specscope.plans.plan_text import describe, plan_dict

    if (tree is None) == (other is None):
        raise UserError("give a TREE, or another program's tree with --from TEXT")
    text, about = (tree, "") if tree is not None else _tree_elsewhere(other or "")
    plan, about = parse_plan(text), about or translated(text)[1]
    if as_json:
        print_json(envelope("tree", plan_dict(plan, about), source=[]))
    else:
        click.echo(describe(plan, mask=mask, about=about if about or other is not None else None))


for command in (compare, diagnose, doctor, export, serve, transformers, tune, verify, vllm, watch, why):
    cli.add_command(command)
