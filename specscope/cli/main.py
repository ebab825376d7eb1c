"""The `specscope` command. Imports each part only when its verb runs; ties an engine to its sinks and a screen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import specscope
from specscope.cli.bench import bench
from specscope.cli.captures import print_json, read_branch, text_console, write_page
from specscope.cli.compare import compare
from specscope.cli.diagnose import diagnose
from specscope.cli.export import export
from specscope.cli.numbers import whole_from
from specscope.cli.options import (
    engine_config,
    engine_options,
    output_options,
    output_settings,
    sampling_options,
    sampling_params,
)
from specscope.cli.serve import serve
from specscope.cli.streams import need_terminal, warn
from specscope.cli.train import train
from specscope.cli.tune import tune
from specscope.cli.verify import verify
from specscope.cli.vllm import vllm
from specscope.cli.watch import watch
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.trace.files import PAGE, check_output

if TYPE_CHECKING:
    from specscope.analyze.report import Report

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=CONTEXT, no_args_is_help=False, invoke_without_command=True)
@click.version_option(specscope.__version__, prog_name="specscope")
@click.pass_context
def cli(context: click.Context) -> None:
    """The debugger for speculative decoding.

    Watch a model draft and verify, token by token. Capture every decision with its evidence, then replay it, report
    on it, or send it to Jaeger.

    \b
      specscope run                                watch the default model live
      specscope capture prompts.txt -o run.jsonl   record without a screen
      specscope replay run.jsonl                   look at a recording
      specscope report run.jsonl                   print its acceptance figures
      specscope verify run.jsonl                   check that it is consistent
      specscope compare before.jsonl after.jsonl   see what changed between two recordings
      specscope diagnose run.jsonl                 name what is wrong with it
      specscope export run.jsonl -o tables         write it as Parquet tables
      specscope tune run.jsonl                     find the draft tree that is fastest
      specscope debug "a prompt"                   stop at a rejection, go back, ask what if
      specscope serve                              serve a model as OpenAI's API does
      specscope watch http://HOST:PORT/metrics     watch a server that reports only counts
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@click.argument("prompts", nargs=-1)
@click.option(
    "--file",
    "file",
    metavar="FILE",
    help="Read prompts from a file: lines of text, or JSON Lines; - is standard input.",
)
@click.option("-o", "--output", metavar="FILE", help="Also capture the run to this file.")
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
    """Decode PROMPTS on a live screen: every draft tree and verdict.

    Without PROMPTS or --file, press i on the screen to enter one.
    """
    from specscope.cli.run import run_live
    from specscope.engine.prompts import prompt_specs

    config = engine_config(flags)
    params, raw = sampling_params(flags)
    settings = output_settings(flags, output, (file, config.target, config.draft_model))
    specs = prompt_specs(prompts, file, params, raw=raw)
    need_terminal("specscope capture PROMPTS -o FILE")
    run_live(config, specs, params, settings, lifetime, raw=raw, paused=paused)


@cli.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Show the engines that send spans to this address: gRPC here, HTTP at the next port.",
)
@click.option("--http-port", type=whole_from(0, 65535), metavar="PORT", help="Another port for HTTP.")
@click.option("--web", is_flag=True, help="Serve the screen of a specscope COMMAND to a browser.  [default: run]")
@click.option(
    "--web-host",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Address to serve on. 0.0.0.0 lets other machines in, with the token in the URL that is printed.",
)
@click.option(
    "--web-port", type=whole_from(1, 65535), default=8000, show_default=True, metavar="PORT", help="Port to serve on."
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.pass_obj
def tui(
    lifetime: Lifetime,
    listen: str | None,
    http_port: int | None,
    web: bool,
    web_host: str,
    web_port: int,
    words: tuple[str, ...],
) -> None:
    """Show engines that run elsewhere, or serve a screen to a browser.

    \b
    specscope tui --listen 127.0.0.1:4317
    specscope tui --web -- replay run.jsonl
    """
    if web:
        from specscope.cli.web import serve as serve_screen

        heard = ["tui", "--listen", listen] if listen is not None else []
        serve_screen(list(words) or heard or ["run"], web_host, web_port)
        return
    if listen is None or words:
        raise UserError("nothing to show: give --listen HOST:PORT, or --web -- replay run.jsonl")
    from specscope.cli.attach import run_attached

    run_attached(listen, http_port, lifetime)


@cli.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPTS]...")
@click.option(
    "--file", metavar="FILE", help="Read prompts from a file: lines of text, or JSON Lines; - is standard input."
)
@click.option("--over", metavar="CAPTURE", help="Debug a recording instead of a live engine.")
@click.option(
    "--attach",
    metavar="SOCKET",
    help="Debug the engine that listens there: specscope serve --debug-socket, or vllm --debug.",
)
@click.option("--commands", "script", metavar="FILE", help="Run the commands in FILE (- is standard input), then exit.")
@click.option("--stop-on-error", is_flag=True, help="With --commands: exit at the first command that fails.")
@engine_options
@sampling_options
def debug(
    prompts: tuple[str, ...],
    file: str | None,
    over: str | None,
    attach: str | None,
    script: str | None,
    stop_on_error: bool,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Debug PROMPTS on a live engine, a recording with --over, or a vLLM that runs with --attach.

    Set breakpoints, step forward and back, ask what if. The run starts paused before step 0. Try
    `break reject if p > 0.2`, then `continue`; `help` lists all commands. A script (--commands) runs to its end; the
    exit code is 2 if a command failed.
    """
    from specscope.cli.debug import converse, debug_vllm, over_capture

    if stop_on_error and script is None:
        raise UserError("--stop-on-error is for a script: give --commands FILE too")
    config = engine_config(flags)
    params, raw = sampling_params(flags)
    if over is not None and attach is not None:
        raise UserError("give one of --over and --attach: a recording, or a vLLM that runs")
    if (over is not None or attach is not None) and (prompts or file is not None):
        name, what = ("--attach", "a vLLM that runs") if over is None else ("--over", "a recording")
        raise UserError(f"{name} debugs {what}, so it takes no prompts")
    if over is not None:
        converse(over_capture(over), script, stop_on_error=stop_on_error)
        return
    if attach is not None:
        debug_vllm(attach, config, script, stop_on_error=stop_on_error)
        return
    from specscope.engine.prompts import prompt_specs
    from specscope.live.local import live_commands

    specs = prompt_specs(prompts, file, params, raw=raw)
    if not specs:
        raise UserError("nothing to debug: give a prompt, --file FILE, or a recording with --over FILE")
    converse(live_commands(config, specs), script, stop_on_error=stop_on_error)


@cli.command()
@click.argument("prompts", metavar="PROMPTS")
@click.option("-o", "--output", required=True, metavar="FILE", help="The capture to write (OTLP JSON Lines).")
@click.option("--log-stats", is_flag=True, help='Print a "SpecDecoding metrics:" line every 10 s, as vLLM does.')
@click.option("--quiet", is_flag=True, help="Print no progress bar and no summary.")
@engine_options
@sampling_options
@output_options
def capture(prompts: str, output: str, log_stats: bool, quiet: bool, **flags: Any) -> None:  # noqa: ANN401
    """Decode a file of prompts and record every step, without a screen.

    PROMPTS is the file (- is standard input). It holds lines of text, or JSON Lines with "prompt" or chat
    "messages", sampling parameters by name, and any other key as a label that reports group by. Ctrl-C ends the run
    and leaves a valid capture.
    """
    from specscope.cli.capture import capture_run
    from specscope.engine.prompts import read_prompts

    config = engine_config(flags)
    params, raw = sampling_params(flags)
    settings = output_settings(flags, output, (prompts, config.target, config.draft_model))
    specs = read_prompts(prompts, params, raw=raw)
    sys.exit(capture_run(config, specs, params, settings, log_stats=log_stats, quiet=quiet))


@cli.command()
@click.argument("file", metavar="FILE")
@click.pass_obj
def replay(lifetime: Lifetime, file: str) -> None:
    """Show the capture FILE on the same screen as a live run.

    The screen has a time slider. FILE#REQUEST@STEP opens at that step of that request: run.jsonl#r3@17. On the screen,
    y copies such a reference.
    """
    from specscope.debug.viewer import Viewer
    from specscope.trace.reading import CaptureReader, split_reference

    with ends_at_once():
        from specscope.tui.program import run_app

        file, start = split_reference(file)
        reader = CaptureReader(file, others_alone=True)
        need_terminal(f"specscope report {file}")
        reader.read(0.1)
    run_app(Viewer.over(reader), lifetime, title=Path(file).name, reference=file, start=start)
    for warning in reader.warnings:
        warn(warning)


@cli.command()
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print all figures, and every request, as JSON.")
@click.option("--html", metavar="PAGE", help="Write a self-contained HTML page with plots.")
@click.option("--branch", type=whole_from(0, 2**31), metavar="N", help="Report on this branch.  [default: the last]")
@click.option(
    "--top", type=whole_from(1, 2**31), metavar="N", help="List N rejected tokens.  [default: 10; 20 in HTML]"
)
def report(file: str, as_json: bool, html: str | None, branch: int | None, top: int | None) -> None:
    """Print the acceptance figures of the capture FILE.

    Pooled, by position and by request, the worst requests first; then questions over many steps: which tokens are
    rejected most, how well the drafter's probability tells acceptance, when drafts are accepted, and where the target's
    choice was. Each row names a step to look at: specscope replay FILE#REQUEST@STEP opens it.
    """
    from specscope.analyze.report import build_report

    if html is not None:
        check_output(html, "--html", (file,), PAGE)
    reader = read_branch(file, branch)
    figures = build_report(reader.history, source=file, warnings=reader.warnings)
    if html is not None:
        _write_page(figures, html, top)
    if as_json:
        print_json(figures.to_dict())
        for warning in reader.warnings:
            warn(warning)
    elif html is None:
        from specscope.analyze.text import TOP, render_text

        render_text(figures, text_console(), top or TOP)


def _write_page(figures: Report, html: str, top: int | None) -> None:
    try:
        from specscope.analyze.page import TOP, render_html
    except ImportError as error:
        raise UserError(f"--html needs {error.name}: pip install 'specscope[html]'") from None
    write_page(html, render_html(figures, top or TOP))


@cli.command()
@click.argument("file", metavar="CAPTURE")
@click.option("--target", metavar="MODEL", help="The target, if not the one that the capture names.")
@click.option("--draft-model", metavar="MODEL", help="The drafter's model, or an EAGLE head, likewise.")
@click.option("--sample", type=whole_from(1, 2**31), metavar="N", help="Judge N steps, evenly spread.  [default: all]")
@click.option("--again", is_flag=True, help="Judge by our own engine: each step once more, in fresh KV.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def audit(
    file: str, target: str | None, draft_model: str | None, sample: int | None, *, again: bool, as_json: bool
) -> None:
    """Check the run in CAPTURE against its models.

    Each recorded path is fed to plain transformers, and p is compared at every node. Then the drafter is checked the
    same way. If nodes differ, the shortest condition that separates them from the rest is printed. Exits with 0 if
    everything agrees, 1 if something differs, 2 if nothing can be judged.
    """
    from specscope.cli.audit import audit_capture

    sys.exit(audit_capture(file, target, draft_model, sample, again=again, as_json=as_json))


@cli.command()
@click.argument("tree", metavar="TREE")
@click.option("--mask/--no-mask", default=True, help="Also draw the attention mask.")
def tree(tree: str, mask: bool) -> None:
    """Draw a draft tree, its attention mask and its cost.

    TREE is written as for --tree:

    \b
      5                           a chain of five
      3x4                         three chains of four
      '[(0,), (1,), (0, 0)]'      any static tree, as paths of child ranks
      top:3x4                     the same shape, but always the likeliest tokens
      dynamic:24,depth=6,top=4    EAGLE-2: the best 24 nodes of a search 6 deep and 4 wide

    The tokens of a static tree are sampled if the request is sampled, and are the likeliest ones if it is greedy.
    """
    from specscope.trace.plan import parse_plan
    from specscope.trace.plan_text import describe

    click.echo(describe(parse_plan(tree), mask=mask))


@cli.command()
@click.option("--step", is_flag=True, help="Also run the default engine, and show where a step's time goes.")
@click.option("--gpu", is_flag=True, help="Instead try every kernel on the GPU, a captured graph, and its memory.")
@click.option("--on", hidden=True, help="With --gpu: another device (cpu, under TRITON_INTERPRET=1).")
@click.option("--target", hidden=True, help="With --gpu: the model that its engine runs.")
def doctor(*, step: bool, gpu: bool, on: str | None, target: str | None) -> None:
    """Show what this machine has, what is missing, and how to fix it."""
    from specscope.cli.doctor import examine, examine_gpu

    missing = 0
    for finding in examine_gpu(on, target) if gpu else examine(step=step):
        mark = "✓" if finding.good else "✗" if finding.needed else "–"
        click.echo(f"{mark} {finding.name:<{34 if gpu else 18}} {finding.text}")
        if not finding.good and finding.remedy:
            click.echo(f"  {'':<18} → {finding.remedy}")
        missing += finding.needed and not finding.good
    sys.exit(1 if missing else 0)


cli.add_command(bench)
cli.add_command(compare)
cli.add_command(diagnose)
cli.add_command(export)
cli.add_command(serve)
cli.add_command(train)
cli.add_command(tune)
cli.add_command(verify)
cli.add_command(vllm)
cli.add_command(watch)
