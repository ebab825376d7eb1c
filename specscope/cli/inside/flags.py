"""The flags of the verbs that run somebody else's program, and the variables that tell it what to record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from specscope.cli.options import (
    apply,
    asked_privacy,
    asked_ratio,
    checked_endpoint,
    from_flag,
    privacy_options,
    sample_option,
    service_option,
    trace_level_option,
)
from specscope.errors import UserError
from specscope.gone import GONE, refuse_gone
from specscope.trace.files import CAPTURE, Existing, check_output
from specscope.trace.inside import settings
from specscope.trace.record.privacy import Privacy


def recorded_options(program: str, *, capture: str) -> Callable[[Any], Any]:
    """Flags that say what is recorded and where it goes. `capture`: more on its flag, as help."""
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--capture",
            metavar="FILE",
            envvar=settings.CAPTURE,
            help=f"Write a capture of the run. {capture}If it exists, the capture gets another name: run.2.jsonl for "
            "run.jsonl.",
        ),
        click.option(
            "--screen",
            is_flag=True,
            help=f"Show the run live in this terminal. The output of {program} goes to a file.",
        ),
        click.option("--otlp-endpoint", metavar="URL", help="Send spans to this URL."),
        service_option,
        trace_level_option,
        click.option("--python", metavar="PATH", help=f"The Python to run {program} with.  [default: this one]"),
        click.option(
            "--evidence",
            type=click.Choice(settings.EVIDENCES),
            default="full",
            help="lean: no likeliest tokens, ranks or entropies.",
        ),
        privacy_options,
        sample_option,
    ]

    return partial(apply, options)


def program_words(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """The program's own words, first among them what click took for no flag of ours. Raises UserError."""
    if words and words[0].startswith("-"):
        refuse_gone(words[0])
    return words


def recorded_variables(flags: dict[str, Any], *, screen: bool, inputs: Sequence[str] = ()) -> dict[str, str | None]:
    """What is recorded and where it goes, as variables: takes these flags out of `flags`.

    `inputs`: files that the capture must not be. Raises UserError.
    """
    capture, endpoint = flags.pop("capture"), flags.pop("otlp_endpoint") or None
    if screen and endpoint is not None and from_flag("otlp_endpoint"):
        raise UserError("--screen receives the spans: leave out --otlp-endpoint, or use watch --listen")
    if capture is not None:
        check_output(capture, "--capture", inputs, CAPTURE, Existing.NEW_NAME)
    asked_ratio(flags["ratio"], sent=screen or endpoint is not None)
    privacy = asked_privacy(flags)
    return {
        settings.CAPTURE: None if capture is None else str(Path(capture).resolve()),
        settings.ENDPOINT: None if endpoint is None else checked_endpoint(endpoint, "--otlp-endpoint"),
        settings.EVIDENCE: flags.pop("evidence"),
        "OTEL_SERVICE_NAME": flags.pop("service_name"),  # of the program's own spans, too
        settings.LEVEL: flags.pop("trace_level"),
        settings.SAMPLE: flags.pop("ratio"),
        settings.NO_TEXT: "1" if privacy >= Privacy.NO_TEXT else None,
        settings.NO_TOKENS: "1" if privacy >= Privacy.NO_TOKENS else None,
    }


def with_variables(given: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the variables given."""
    variables = {name: value for name, value in os.environ.items() if name not in (*given, *GONE)}
    return variables | {name: value for name, value in given.items() if value is not None}
