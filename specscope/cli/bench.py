"""`specscope bench`: the flags of its verb `serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specscope.cli.numbers import Number, real_from, whole_from
from specscope.errors import UserError
from specscope.trace.files import FIGURES, PLOT, check_output
from specscope.trace.record.params import PARAM_TYPES

# The files that benchmarks write, as flags.


def figures_file(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Refuse an unusable --json file before minutes of measuring, not after."""
    if path is not None:
        check_output(path, "--json", (), FIGURES)
    return path


def plot_file(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """The same for --plot."""
    if path is not None:
        if Path(path).suffix.lower() not in (".svg", ".png"):
            raise UserError(f"--plot {path}: write a name that ends in .svg or .png")
        check_output(path, "--plot", (), PLOT)
    return path


json_option = click.option(
    "--json", "json_file", metavar="FILE", callback=figures_file, help="Also write the figures to this file."
)


MOST = 64  # numbers in a list
MOST_SERVERS = 8


class NumberList(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click alone
    """Several numbers, with commas between them."""

    name = "numbers"

    def __init__(self, kind: Number) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:  # noqa: ANN401
        """The numbers in a text; a default is returned as it is."""
        if not isinstance(value, str):
            return tuple(value)
        words = value.split(",")
        if len(words) > MOST:
            raise UserError(f"{param.opts[0] if param else 'the list'} takes at most {MOST} numbers")
        return tuple(self.kind.convert(word, param, ctx) for word in words)


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS = [
    click.option("--model", metavar="NAME", help="Model to ask for.  [default: the first that the server lists]"),
    click.option(
        "--dataset",
        metavar="FILE",
        help="ShareGPT's JSON, SPEED-Bench's, Spec-Bench's or vLLM's custom JSON Lines, a prompt file, or lines of "
        "text.  [default: 65 built-in prompts]",
    ),
    click.option(
        "--rate",
        type=NumberList(real_from(0.001, 1e6)),
        metavar="R,...",
        help="Requests per second, with random arrival times; several values are run one after another.",
    ),
    click.option(
        "--concurrency",
        type=NumberList(whole_from(1, 10_000)),
        metavar="N,...",
        help="Requests at once; each answer starts the next request.  [default: 1]",
    ),
    click.option(
        "--requests", type=whole_from(1, 100_000), default=100, show_default=True, metavar="N", help="Requests per run."
    ),
    click.option(
        "--max-tokens",
        type=Number(PARAM_TYPES["max_tokens"]),
        metavar="N",
        help="Maximum output tokens per request.  [default: as the dataset says, else 128]",
    ),
    click.option(
        "--temperature",
        type=Number(PARAM_TYPES["temperature"]),
        default=0.0,
        metavar="T",
        help="Sampling temperature; 0 is greedy.  [default: 0]",
    ),
    click.option(
        "--seed",
        type=Number(PARAM_TYPES["seed"]),
        default=0,
        show_default=True,
        metavar="N",
        help="Seed of arrival times, prompt order and sampling.",
    ),
    click.option(
        "--burstiness",
        type=real_from(0.05, 1000),
        default=1.0,
        metavar="B",
        help="Shape of the gamma distribution of the gaps between requests: 1 is Poisson, less is burstier.  "
        "[default: 1]",
    ),
    click.option(
        "--warm-up",
        type=whole_from(0, 10_000),
        default=4,
        show_default=True,
        metavar="N",
        help="Requests that are not counted, before each load.",
    ),
    click.option(
        "--rounds",
        type=whole_from(1, 100),
        metavar="N",
        help="How many times each load is run, servers in turn.  [default: 1; 3 with several servers]",
    ),
    click.option("--ignore-eos", is_flag=True, help="Ask for max-tokens tokens whatever the text (vLLM, SGLang)."),
    click.option(
        "--timeout",
        type=real_from(0.1, 1e6),
        default=600.0,
        metavar="S",
        help="Seconds that an answer may take.  [default: 600]",
    ),
    click.option("--chat/--completions", default=True, help="Which endpoint to use.  [default: chat]"),
    click.option(
        "--percentiles",
        type=NumberList(real_from(0, 100)),
        default=(99.0,),
        metavar="P,...",
        help="Percentiles of the times.  [default: 99]",
    ),
    click.option(
        "--api-key-env",
        default="OPENAI_API_KEY",
        show_default=True,
        metavar="NAME",
        help="Environment variable that holds the API key, if there is one.",
    ),
    click.option("--detailed", is_flag=True, help="With --json: also the times of each request."),
    click.option(
        "--plot", metavar="FILE", callback=plot_file, help="Draw latency over load to this file, .svg or .png."
    ),
]


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure servers under load.

    \b
      specscope bench serve http://127.0.0.1:8000 --concurrency 1,8,32
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@bench.command("serve")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@json_option
@_options
def bench_serve(
    urls: tuple[str, ...],
    json_file: str | None,
    rate: tuple[float, ...] | None,
    concurrency: tuple[int, ...] | None,
    plot: str | None,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Measure throughput and latency of OpenAI-compatible servers.

    \b
      specscope bench serve http://127.0.0.1:8000 --concurrency 1,8,32
      specscope bench serve http://127.0.0.1:8000 --rate 1,2,4 --plot rate.svg
      specscope bench serve http://127.0.0.1:8000 http://127.0.0.1:8001

    Several servers get the same requests in turn, and the first is compared with the others.
    """
    if len(urls) > MOST_SERVERS:
        raise UserError(f"at most {MOST_SERVERS} servers can be measured in turn")
    if rate and concurrency:
        raise UserError("give either --rate or --concurrency")
    if flags["detailed"] and json_file is None:
        raise UserError("--detailed needs --json FILE")
    sys.exit(_run(urls, json_file, rate, concurrency or (1,), plot, flags))


def _run(
    urls: tuple[str, ...],
    json_file: str | None,
    rates: tuple[float, ...] | None,
    concurrencies: tuple[int, ...],
    plot: str | None,
    flags: dict[str, Any],
) -> int:
    from specscope.bench.datasets import Load
    from specscope.bench.endpoint import RequestOptions, base_url
    from specscope.bench.sweep import LoadPlan, run_serve

    for url in urls:
        base_url(url)
    loads = [Load(rate=rate) for rate in rates] if rates else [Load(concurrency=count) for count in concurrencies]
    request = RequestOptions(
        **{name: flags.pop(name) for name in ("chat", "max_tokens", "temperature", "seed", "ignore_eos", "timeout")}
    )
    flags["rounds"] = flags["rounds"] or (1 if len(urls) == 1 else 3)
    key = os.environ.get(flags.pop("api_key_env")) or None
    return run_serve(LoadPlan(urls, loads, request, key=key, **flags), json_file, plot)
