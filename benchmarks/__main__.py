"""`python -m benchmarks NAME`: the developers' measurements. Each imports what it measures when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from specscope.__main__ import entry
from specscope.cli.options import engine_config, engine_options, whole_from
from specscope.engine.config import EngineConfig
from specscope.live.start import check_places, share_cores
from specscope.trace.files import FIGURES, check_output

F = TypeVar("F", bound=Callable[..., Any])
PARTS = ("reading", "start", "speed", "recording")  # of `figures`


def output_file(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Refuse an unusable file before minutes of measuring, not after."""
    if path is not None:
        check_output(path, option.opts[0], (), FIGURES)
    return path


json_option = click.option(
    "--json", "json_file", metavar="FILE", callback=output_file, help="Also write the figures to this file."
)
rounds_option = click.option(
    "--rounds", type=whole_from(1, 100), metavar="N", default=5, show_default=True, help="Rounds of interleaved A/B."
)


def checked(flags: dict[str, Any]) -> EngineConfig:
    """What to measure. Raises UserError for what is not there, before seconds go into importing torch."""
    config = engine_config(flags)
    check_places(config)
    return config


def paired(function: F) -> F:
    """The flags of every benchmark that compares engines."""
    return rounds_option(json_option(engine_options(function)))


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure speed, memory and the cost of observation.

    Comparisons are ratios of medians from interleaved A/B runs.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        return
    share_cores()


@bench.command("cpu")
@paired
def bench_cpu(rounds: int, json_file: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Compare tokens/s with transformers' generate().

    \b
      python -m benchmarks cpu --rounds 3

    At batch 1 and 8; also n-gram and the default drafter on copy-heavy prompts, and the default drafter on unseen ones.
    """
    config = checked(flags)
    from benchmarks.cpu import run_cpu

    run_cpu(config, rounds, json_file)


@bench.command("peers")
@paired
@click.option("--vllm", metavar="PYTHON", help="bin/python of an environment with vLLM: also measure that.")
def bench_peers(rounds: int, json_file: str | None, vllm: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Compare tokens/s at batch 1 with generate() and, with --vllm, vLLM.

    \b
      python -m benchmarks peers --vllm /path/to/vllm/bin/python
    """
    config = checked(flags)
    from benchmarks.peers import run_peers

    run_peers(config, vllm, rounds, json_file)


@bench.command("scale")
@paired
@click.option("--vllm", metavar="PYTHON", help="bin/python of an environment with vLLM: also measure that.")
def bench_scale(rounds: int, json_file: str | None, vllm: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Measure tokens/s over batch size, context length and mixed batches.

    \b
      python -m benchmarks scale --rounds 2

    Plain decoding, beside transformers and, with --vllm, vLLM; and what contexts add to a step, beside the time that
    their bytes take.
    """
    config = checked(flags)
    from benchmarks.scale import run_scale

    run_scale(config, rounds, json_file, vllm=vllm)


@bench.command("kernels")
@json_option
def bench_kernels(json_file: str | None) -> None:
    """Compare each Triton kernel with its memory traffic (needs a GPU).

    \b
      python -m benchmarks kernels

    Attention is also compared with SDPA and FlexAttention.
    """
    from benchmarks.kernels import run_kernels

    run_kernels(json_file)


@bench.command("gpu")
@json_option
def bench_gpu(json_file: str | None) -> None:
    """Measure verify steps of 8B and 1.7B shapes (needs a GPU).

    \b
      python -m benchmarks gpu --json figures.json

    They are compared with their memory traffic and with generate().
    """
    from benchmarks.gpu import run_gpu

    run_gpu(json_file)


@bench.command("debug")
@paired
def bench_debug(rounds: int, json_file: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Measure the cost of a debugging session and of twenty conditional breakpoints that never hit.

    \b
      python -m benchmarks debug
    """
    config = checked(flags)
    from benchmarks.debug import run_debug

    run_debug(config, rounds, json_file)


@bench.command("attach")
@click.argument("sample", metavar="CAPTURE")
@click.option(
    "--seconds", type=whole_from(5, 3600), metavar="N", default=60, show_default=True, help="How long to send steps."
)
def bench_attach(sample: str, seconds: int) -> None:
    """Test whether an attached screen keeps up with 200 steps/s, taken from CAPTURE, and how fast it answers keys.

    \b
      python -m benchmarks attach run.jsonl --seconds 20
    """
    from benchmarks.attach import run_attach

    run_attach(sample, seconds)


@bench.command("observe")
@paired
@click.option("--screen/--no-screen", default=True, help="Measure the live screen too.")
def bench_observe(rounds: int, json_file: str | None, screen: bool, **flags: Any) -> None:  # noqa: ANN401
    """Measure the cost of capture, metrics and the screen: tokens/s with them over tokens/s without.

    \b
      python -m benchmarks observe --no-screen
    """
    config = checked(flags)
    from benchmarks.observe import run_observe

    run_observe(config, rounds, json_file, screen=screen)


@bench.command("inside")
@paired
def bench_inside(rounds: int, json_file: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Measure the cost of recording inside transformers' generate().

    \b
      python -m benchmarks inside --rounds 40

    Tokens/s recorded over tokens/s without, at batch 1, for each way to draft that the target has by itself.
    """
    config = checked(flags)
    from benchmarks.inside import run_inside

    run_inside(config, rounds, json_file)


@bench.command("traces")
@json_option
@engine_options
def bench_traces(json_file: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Measure how many bytes and spans each step sends to an OTLP endpoint.

    \b
      python -m benchmarks traces --json traces.json

    For each trace level, evidence level and sampling ratio.
    """
    config = checked(flags)
    from benchmarks.traces import run_traces

    run_traces(config, json_file)


@bench.command("replay")
@click.argument("sample", metavar="CAPTURE")
@click.option(
    "--rounds", type=whole_from(1, 100), metavar="N", default=3, show_default=True, help="How often to measure."
)
@click.option(
    "--steps",
    type=whole_from(100, 1_000_000),
    metavar="N",
    default=10_000,
    show_default=True,
    help="Steps of the long capture.",
)
def bench_replay(sample: str, rounds: int, steps: int) -> None:
    """Measure time to the first screen, and memory, of a long capture made of CAPTURE's steps.

    \b
      python -m benchmarks replay run.jsonl --steps 2000
    """
    from benchmarks.replay import run_replay

    run_replay(sample, rounds, steps)


@bench.command("faults")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--only", "names", metavar="NAME", multiple=True, help="Only this fault or healthy run. Repeatable.")
@click.option(
    "--against",
    metavar="OLD",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Rows of an earlier run, .jsonl or .jsonl.gz, to be compared with.",
)
@click.option("--vllm", metavar="PYTHON", help="bin/python of an environment with vLLM: plant its faults into that.")
def bench_faults(folder: Path, names: tuple[str, ...], against: Path | None, vllm: str | None) -> None:
    """Plant every known fault, and write down what `diagnose` and `locate` find.

    \b
      python -m benchmarks faults out --only "one more" --only "KV not moved"
      python -m benchmarks faults out --against benchmarks/notes/house/5301d291/faults.jsonl.gz

    Each fault is planted always and in a few steps alone; healthy runs follow. The rows stand in DIR/faults.jsonl, and
    those that are there are not run again: two hours of a processor in all. Needs a clone: the faults are in tests/.

    Exit code: 1 where a row is worse than in OLD: its name is not right any more, its place is lost or another one, or
    it takes 1.2 times the processor time.
    """
    from benchmarks.faults.run import run_faults

    sys.exit(run_faults(folder, names, against, vllm) > 0)


@bench.command("figures")
@click.argument("folder", metavar="DIR")
@click.option("--of", "of", metavar="NAME=FOLDER", multiple=True, help="A checkout to measure.  [default: this one]")
@click.option("--only", metavar="PART", multiple=True, type=click.Choice(PARTS), help="Measure this part alone.")
@click.option("--rounds", type=whole_from(1, 100), metavar="N", default=5, show_default=True, help="How often.")
@click.option("--steps", type=whole_from(100, 10**6), metavar="N", default=90_000, show_default=True, help="To read.")
@click.option("--prompts", type=whole_from(1, 50), metavar="N", default=10, show_default=True, help="To decode.")
@click.option("--target", metavar="MODEL", help="The model to decode with.  [default: SmolLM2-135M-Instruct]")
@click.option("--dtype", default="auto", show_default=True, help="Number format of the models.")
@click.option("--busy", is_flag=True, help="Keep two processors busy while the engines start.")
@click.option("--vllm", metavar="PYTHON", help="bin/python of an environment with vLLM and the plugin.")
@click.option("--against", metavar="FILE", help="An earlier figures.json to compare with.")
def bench_figures(folder: str, of: tuple[str, ...], only: tuple[str, ...], against: str | None, **plan: Any) -> None:  # noqa: ANN401
    """Measure reading, starting, decoding and recording, of one or several checkouts in turn.

    \b
      python -m benchmarks figures out --only reading --steps 9000
      python -m benchmarks figures out --of new=. --of old=../old --only speed --rounds 20
    """
    from benchmarks.figures.run import run_figures

    run_figures(folder, of, only or PARTS, against, **plan)


@bench.command("freeze")
@click.argument("folder", metavar="DIR")
@click.option("--against", metavar="OLD", help="Compare with these results: such a folder, or a .tar.xz of one.")
@click.option("--cases", metavar="FOLDER", default="../shared/cases", show_default=True, help="Inputs beside samples.")
def bench_freeze(folder: str, against: str | None, cases: str) -> None:
    """Write what every verb that reads a file says of every capture and input.

    \b
      python -m benchmarks freeze before
      python -m benchmarks freeze after --against before

    With --against it prints each difference by file, verb and key, and exits with 1 where there is one.
    """
    from benchmarks.freeze.run import run_freeze

    sys.exit(run_freeze(folder, cases, against))


if __name__ == "__main__":
    entry(bench, "python -m benchmarks")
