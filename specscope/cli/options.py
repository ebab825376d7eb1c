"""The flags that several verbs share, and the objects they become."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource

from specscope.cli.arguments import Number, whole_from
from specscope.cli.streams import say
from specscope.engine.config import EngineConfig, named_code
from specscope.engine.prompts import PromptSpec, prompt_specs, read_template
from specscope.errors import UserError
from specscope.trace.checked import Flag, Port, base_of, checked_url, flags_of, required_types
from specscope.trace.files import CAPTURE, Existing, check_output, read_lines
from specscope.trace.record.params import LONGEST_SCHEMA, SamplingParams, StructuredOutputs
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import TEMPLATE
from specscope.trace.wire.outputs import OutputOptions, check_metrics_port
from specscope.trace.wire.sampling import read_ratio
from specscope.trace.wire.spans import SpanLevel

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
F = TypeVar("F", bound=Callable[..., Any])


def _options(kind: type) -> list[Callable[[Any], Any]]:
    """A flag for each field that declares one; its value is None where it is not given."""
    types = required_types(kind)
    return [_option(name, flag, types[name]) for name, flag in flags_of(kind).items()]


def _option(name: str, declared: Flag, kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401
    spelled, base = declared.name or f"--{name.replace('_', '-')}", base_of(kind)
    if base is bool:
        both = f"{spelled}/--no-{spelled[2:]}" if declared.negated else spelled
        return click.option(both, name, is_flag=True, default=None, help=declared.help)
    several = get_origin(base) is tuple
    item = get_args(base)[0] if several else kind
    number = Number(item) if base_of(item) in (int, float) else None
    of_these = click.Choice(declared.choices) if declared.choices else None
    shown = f"{spelled},{name} {declared.metavar}".rstrip()
    return flag(shown, declared.help, of_these or number, multiple=several, is_flag=None)


def flag(spelled: str, about: str, kind: Any = None, **how: Any) -> Callable[[F], F]:  # noqa: ANN401
    """A flag: its names and what stands for its value, as in "-o,--output FILE"; without value and type, a switch."""
    names, _, metavar = spelled.partition(" ")
    how = {"show_default": "default" in how, "is_flag": None if metavar or kind else True, **how}
    return click.option(*names.split(","), type=kind, metavar=metavar or None, help=about, **how)


_ENGINE = _options(EngineConfig)
_SAMPLING = [
    *_options(SamplingParams),
    flag("--json-schema FILE", "The output must be JSON that fits this schema, given as a file or as text."),
    flag("--json-object", "The output must be a JSON object.", default=None),
    flag("--regex REGEX", "The whole output must match this regular expression."),
    flag("--choice TEXT", "The output must be one of these; give the flag once for each.", multiple=True),
    flag("--grammar FILE", "The output must follow this EBNF grammar, given as a file or as text."),
    flag("--raw", "Do not apply the chat template."),
    flag("--chat-template-kwargs JSON", "Variables of the chat template, such as '{\"enable_thinking\": false}'."),
]
service_option = flag(
    "--service-name NAME",
    "Service name of request spans; engine steps are under 'NAME engine'.  [default: $OTEL_SERVICE_NAME, else "
    "specscope]",
)
trace_level_option = flag(
    "--trace-level",
    "What to send to the endpoint; requests: one span per request, with its figures. Captures always hold trees.",
    click.Choice([level.value for level in SpanLevel]),
    default="trees",
)
_OUTPUT = [
    flag("--otlp-endpoint URL", "Send spans here, e.g. http://localhost:4317."),
    flag(
        "--otlp-protocol",
        "[default: http/protobuf at port 4318, else grpc]",
        click.Choice(["grpc", "http/protobuf"]),
    ),
    service_option,
    trace_level_option,
    flag(
        "--on-full",
        "If the capture's disk is full: end the run, or drop steps and count them.  [default: stop; drop for serve]",
        click.Choice(["stop", "drop"]),
    ),
    flag("--metrics-port PORT", "Serve Prometheus metrics on this port.", Number(Port)),
]
_PRIVACY = [
    flag("--no-text", "Leave out all text, wherever records go. Token ids stay."),
    flag("--no-tokens", "Leave out token ids too. Shapes, numbers and times stay."),
]
own_drafter_option = flag("--drafter NAME", "The run's drafter, if it is your module:Class.")
file_option = flag("--file FILE", "Read prompts from a file of lines or JSON. Standard input is -.")
no_clobber_option = flag("--no-clobber", "Refuse to replace an older capture.")
target_option = flag("--target MODEL", "Target model.  [default: the one in the capture]")
head_option = flag("--draft-model MODEL", "Draft model or EAGLE head.  [default: the one in the capture]")
json_option = flag("--json,as_json", "Print JSON.")
branch_option = flag("--branch N", "Read this branch of the run.  [default: the last]", whole_from(0, 2**31))
GROUP_OF = {  # of a flag that several verbs share
    **dict.fromkeys((field.name for field in fields(EngineConfig)), "engine"),
    **dict.fromkeys(flags_of(SamplingParams), "sampling"),
    **dict.fromkeys(("json_schema", "json_object", "regex", "choice", "grammar", "raw", TEMPLATE), "sampling"),
    **dict.fromkeys(("otlp_endpoint", "otlp_protocol", "service_name", "trace_level", "on_full"), "output"),
    **dict.fromkeys(("metrics_port", "no_text", "no_tokens", "ratio"), "output"),
}
sample_option = flag(
    "--sample,ratio RATIO",
    "Send the spans of this share of requests, chosen as OpenTelemetry does; a caller's sampled flag takes precedence.",
)


def apply(options: Sequence[Callable[[Any], Any]], function: F) -> F:
    """A function with these options, the first of them above the others."""
    for option in reversed(options):
        function = option(function)
    return function


# Of the engine, of how requests are sampled, of where records go, of what is left out of them, of where spans go
engine_options, sampling_options = partial(apply, _ENGINE), partial(apply, _SAMPLING)
output_options = partial(apply, [*_OUTPUT, *_PRIVACY, sample_option])
privacy_options, sending_options = partial(apply, _PRIVACY), partial(apply, _OUTPUT[:3])


def refuse_others(flag: str, why: str, allowed: Container[str] = (), refused: Container[str] | None = None) -> None:
    """Refuse options that have no effect beside `flag`: all but those allowed, or those named. Raises UserError."""
    for option in click.get_current_context().command.params:
        name = option.name or ""
        if from_flag(name) and name not in allowed and (refused is None or name in refused):
            raise UserError(f"{flag} {why}: leave out {option.opts[-1]}")


def from_flag(name: str) -> bool:
    """Whether an option was given on the command line, and not by its variable."""
    context = click.get_current_context(silent=True)
    return context is None or context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def engine_config(flags: dict[str, Any]) -> EngineConfig:
    """Take the engine's flags out of `flags`. Raises UserError for values that do not fit together."""
    given = {field.name: flags.pop(field.name) for field in fields(EngineConfig) if field.name in flags}
    return EngineConfig(**named_code({name: value for name, value in given.items() if value is not None}))


def sampling_params(flags: dict[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """Take the sampling flags out of `flags`: the parameters, and how prompts become text (of `prompt_specs`)."""
    given = {name: flags.pop(name) for name in flags_of(SamplingParams)}
    given["structured_outputs"] = structured_outputs(flags)
    raw, template = flags.pop("raw"), flags.pop("chat_template_kwargs")
    if raw and template is not None:
        raise UserError("--chat-template-kwargs needs the chat template and --raw leaves it out: give one of them")
    how = {"raw": raw, "template": {} if template is None else read_template(template)}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None}), how


def read_specs(
    prompts: Sequence[str],
    file: str | None,
    params: SamplingParams,
    how: Mapping[str, Any],
    privacy: Privacy = Privacy.EVERYTHING,
    **more: Any,  # noqa: ANN401
) -> list[PromptSpec]:
    """The prompts; invalid grammars, schemas and expressions are refused before a model is loaded. Raises UserError,
    which quotes nothing of a prompt where texts are left out.
    """
    try:
        specs = prompt_specs(prompts, file, params, **how, **more, tell=lambda line: say(f"specscope: {line}"))
    except UserError as error:
        if privacy is Privacy.EVERYTHING:
            raise
        raise UserError(re.sub(r"'[^']*'|\"[^\"]*\"", "a value that is not shown", str(error))) from None
    if any(spec.params.structured_outputs is not None for spec in specs):
        from specscope.speculate.structured.compiler import check_forms

        check_forms(spec.params.structured_outputs for spec in specs)
    return specs


def structured_outputs(flags: dict[str, Any]) -> StructuredOutputs | None:
    """Take the flags of structured output out of `flags`. Raises UserError."""
    schema, grammar = flags.pop("json_schema"), flags.pop("grammar")
    given = {
        "json": None if schema is None else _text_or_file(schema, "the JSON schema", is_text="{" in schema),
        "grammar": None if grammar is None else _text_or_file(grammar, "the grammar", is_text="::=" in grammar),
        "choice": flags.pop("choice") or None,
        "regex": flags.pop("regex"),
        "json_object": flags.pop("json_object"),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return StructuredOutputs(**given) if given else None


def _text_or_file(given: str, what: str, *, is_text: bool) -> str:
    if is_text:
        return given
    return "\n".join(line for _, line in read_lines(given, what, largest=LONGEST_SCHEMA * 4))


def output_settings(
    flags: dict[str, Any], capture: str | None, inputs: Iterable[str | None] = (), *, unattended: bool = False
) -> OutputOptions:
    """Take the output flags out of `flags`. `inputs`: files that the command reads, which it must not overwrite.

    `unattended`: the command may run without anybody watching, and should go on.
    """
    no_clobber, on_full = flags.pop("no_clobber", False), flags.pop("on_full", None)
    existing = Existing.NEW_NAME if unattended else Existing.REFUSE if no_clobber else Existing.REPLACE
    if capture is not None:
        check_output(capture, "-o", inputs, CAPTURE, existing)
    elif no_clobber or on_full is not None:
        raise UserError(f"{'--no-clobber' if no_clobber else '--on-full'} applies to a capture: give -o FILE")
    endpoint = flags.pop("otlp_endpoint")
    for name in ENDPOINTS:
        if os.environ.get(name):
            checked_endpoint(os.environ[name], name)
    if (port := flags.pop("metrics_port", None)) is not None:
        check_metrics_port(port)
    sent = endpoint is not None or any(map(os.environ.get, ENDPOINTS))
    return OutputOptions(
        ratio=asked_ratio(flags.pop("ratio", None), sent=sent),
        capture=capture,
        otlp_endpoint=None if endpoint is None else checked_endpoint(endpoint, "--otlp-endpoint"),
        otlp_protocol=flags.pop("otlp_protocol"),
        service=flags.pop("service_name") or "",
        level=SpanLevel(flags.pop("trace_level", SpanLevel.TREES)),
        metrics_port=port,
        privacy=asked_privacy(flags),
        existing=existing,
        drops=on_full == "drop" or (unattended and on_full is None),
    )


def asked_privacy(flags: dict[str, Any]) -> Privacy:
    """Take the flags of privacy out of `flags`; warns of what the level does not cover."""
    asked = Privacy.of(no_text=flags.pop("no_text"), no_tokens=flags.pop("no_tokens"))
    if asked.remark:
        say(asked.remark)
    return asked


def asked_ratio(sample: str | None, *, sent: bool) -> float | None:
    """The share of requests whose spans are sent. `sent`: whether spans are. Raises UserError."""
    ratio = read_ratio(sample, "--sample")
    if ratio is not None and not sent and from_flag("ratio"):
        raise UserError("--sample applies to spans that are sent: give --otlp-endpoint")
    return ratio


def checked_endpoint(text: str, name: str) -> str:
    """An OTLP endpoint as a URL of http or https. Raises UserError."""
    url = text if "://" in text else f"http://{text}"
    checked_url(url, f"{name} {{}}: write http://HOST:PORT or https://HOST:PORT")
    return url
