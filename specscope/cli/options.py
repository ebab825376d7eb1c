"""The flags that several verbs share, and the objects they become."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from specscope.cli.numbers import Number, whole_from
from specscope.cli.streams import say
from specscope.engine.config import Context, Count, EngineConfig, Gib, Shared, StepTokens, Threads
from specscope.engine.prompts import read_template
from specscope.errors import UserError
from specscope.trace.checked import Port, checked_url
from specscope.trace.files import CAPTURE, Existing, check_output, read_lines
from specscope.trace.record.params import MOST_LOGPROBS, PARAM_TYPES, SamplingParams, TokenId
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.rules import RULES
from specscope.trace.record.structured import LONGEST_SCHEMA, StructuredOutputs
from specscope.trace.record.trace_sampling import BUFFER_MIB, TraceSampling
from specscope.trace.request_words import read_sampling
from specscope.trace.wire.outputs import OutputOptions, check_metrics_port
from specscope.trace.wire.spans import SpanLevel

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
F = TypeVar("F", bound=Callable[..., Any])

_ENGINE = [
    click.option(
        "--target",
        metavar="MODEL",
        help="Model: a folder, a hub name or a .gguf file.  [default: SmolLM2-135M-Instruct]",
    ),
    click.option(
        "--drafter",
        metavar="DRAFTER",
        help="eagle, ngram, suffix, suffix+eagle, ngram+eagle, draft_model, none, or synthetic:0.8,0.6,...  "
        "[default: suffix+eagle; eagle with --tree, --no-adaptive or a head of your own; ngram with --target]",
    ),
    click.option(
        "--draft-model",
        metavar="MODEL",
        help="An EAGLE head, a smaller model, or self:N (the target's first N layers).",
    ),
    click.option(
        "--tree",
        metavar="TREE",
        help="Draft tree: 5, 3x5, '[(0,), (1,), (0, 0)]', top:3x5 or dynamic:16; see specscope tree -h.",
    ),
    click.option(
        "--suffix-shared",
        type=Number(Shared),
        metavar="TOKENS",
        help="How many tokens of earlier requests suffix decoding also searches.  [default: 0]",
    ),
    click.option(
        "--speculation",
        type=click.Choice(("on", "off", "auto")),
        help="Whether to draft; auto is the same as --adaptive: draft as much as pays, which may be nothing.  "
        "[default: on]",
    ),
    click.option(
        "--disable-above",
        type=Number(Count),
        metavar="N",
        help="Stop drafting when more than N requests decode; resume when a quarter fewer do.",
    ),
    click.option(
        "--async-scheduling/--no-async-scheduling",
        default=None,
        help="Run a step while the one before is still being recorded; under a debugger, steps run one at a time.  "
        "[default: off]",
    ),
    click.option(
        "--rule",
        type=click.Choice(RULES),
        help="How drafts are verified; block and traversal accept more sampled drafts.  [default: standard]",
    ),
    click.option(
        "--adaptive/--no-adaptive",
        default=None,
        help="Fit each tree to measured costs and recent acceptance.  [default: on unless --tree is given]",
    ),
    click.option(
        "--costs",
        metavar="FILE",
        help="Step costs for adaptive trees; measured if FILE does not exist.  [default: in your cache]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="Number format of the models.  [default: auto]",
    ),
    click.option("--device", metavar="DEVICE", help="Where to run: cpu, cuda or auto.  [default: auto]"),
    click.option(
        "--backend",
        type=click.Choice(["auto", "torch", "triton"]),
        help="Kernels; triton needs a GPU.  [default: auto]",
    ),
    click.option("--graphs", type=click.Choice(["auto", "off"]), help="Use CUDA graphs on a GPU.  [default: auto]"),
    click.option("--max-batch", type=Number(Count), metavar="N", help="Maximum requests in a batch.  [default: 8]"),
    click.option(
        "--max-step-tokens", type=Number(StepTokens), metavar="N", help="Maximum tokens in one step.  [default: 512]"
    ),
    click.option(
        "--max-context",
        type=Number(Context),
        metavar="N",
        help="Maximum tokens in a request.  [default: the model's limit]",
    ),
    click.option(
        "--evidence",
        type=click.Choice(["auto", "full", "lean"]),
        help="lean leaves out entropies, ranks and likeliest tokens.  [default: full; lean on a GPU]",
    ),
    click.option("--kv-memory", type=Number(Gib), metavar="GIB", help="Memory for the KV cache.  [default: 1]"),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=None,
        help="Reuse the KV of earlier requests with the same first tokens.  [default: off]",
    ),
    click.option("--threads", type=Number(Threads), metavar="N", help="CPU threads.  [default: torch's choice]"),
]
_SAMPLING = [
    click.option(
        "--temperature",
        type=Number(PARAM_TYPES["temperature"]),
        metavar="T",
        help="Sampling temperature; 0 is greedy.  [default: 0]",
    ),
    click.option(
        "--top-k",
        type=Number(PARAM_TYPES["top_k"]),
        metavar="K",
        help="Keep the K likeliest tokens; 0 keeps all.  [default: 0]",
    ),
    click.option(
        "--top-p",
        type=Number(PARAM_TYPES["top_p"]),
        metavar="P",
        help="Keep the likeliest tokens that together reach probability P.  [default: 1]",
    ),
    click.option(
        "--min-p",
        type=Number(PARAM_TYPES["min_p"]),
        metavar="P",
        help="Drop tokens below P times the largest probability.  [default: 0]",
    ),
    click.option(
        "--repetition-penalty",
        type=Number(PARAM_TYPES["repetition_penalty"]),
        metavar="R",
        help="Penalty on tokens in the prompt or output; 1 is off.  [default: 1]",
    ),
    click.option(
        "--presence-penalty",
        type=Number(PARAM_TYPES["presence_penalty"]),
        metavar="R",
        help="Penalty on tokens in the output; 0 is off.  [default: 0]",
    ),
    click.option(
        "--frequency-penalty",
        type=Number(PARAM_TYPES["frequency_penalty"]),
        metavar="R",
        help="Penalty for each time a token is in the output; 0 is off.  [default: 0]",
    ),
    click.option("--seed", type=Number(PARAM_TYPES["seed"]), metavar="N", help="Seed of every coin.  [default: 0]"),
    click.option(
        "--max-tokens",
        type=Number(PARAM_TYPES["max_tokens"]),
        metavar="N",
        help="Maximum output tokens per request.  [default: 128]",
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the output at this text; may be given more than once."
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Continue past the end-of-sequence token."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=Number(TokenId),
        multiple=True,
        metavar="ID",
        help="End the output at this token; may be given more than once.",
    ),
    click.option(
        "--min-tokens",
        type=Number(PARAM_TYPES["min_tokens"]),
        metavar="N",
        help="Minimum output tokens: EOS and stop tokens are masked before.  [default: 0]",
    ),
    click.option(
        "--logprobs",
        type=whole_from(0, MOST_LOGPROBS),
        metavar="N",
        help="Record the log-probabilities of each output token and of the N likeliest tokens, before sampling "
        "parameters apply.",
    ),
    click.option(
        "--json-schema",
        metavar="FILE",
        help="The output must be JSON that fits this schema, given as a file or as text.",
    ),
    click.option("--json-object", is_flag=True, default=None, help="The output must be a JSON object."),
    click.option("--regex", metavar="REGEX", help="The whole output must match this regular expression."),
    click.option(
        "--choice", multiple=True, metavar="TEXT", help="The output must be one of these; give the flag once for each."
    ),
    click.option(
        "--grammar", metavar="FILE", help="The output must follow this EBNF grammar, given as a file or as text."
    ),
    click.option("--raw", is_flag=True, help="Do not apply the chat template."),
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
    ),
]
_OUTPUT = [
    click.option("--otlp-endpoint", metavar="URL", help="Send spans and metrics here, e.g. http://localhost:4317."),
    click.option(
        "--otlp-protocol",
        type=click.Choice(["grpc", "http/protobuf"]),
        help="[default: http/protobuf at port 4318, else grpc]",
    ),
    click.option(
        "--trace-level",
        type=click.Choice([level.value for level in SpanLevel]),
        default="trees",
        show_default=True,
        help="What is sent to the endpoint; captures always hold trees.",
    ),
    click.option(
        "--on-full",
        type=click.Choice(["stop", "drop"]),
        help="When the capture's disk is full: end the run, or drop steps and say how many.  [default: stop; drop for "
        "serve]",
    ),
    click.option("--metrics-port", type=Number(Port), metavar="PORT", help="Serve Prometheus metrics on this port."),
]
_PRIVACY = [
    click.option(
        "--no-text",
        is_flag=True,
        help="Leave out prompts, output and all other text, wherever records go. Token ids stay.",
    ),
    click.option("--no-tokens", is_flag=True, help="Leave out token ids too: shapes, probabilities and times stay."),
]
no_clobber_option = click.option("--no-clobber", is_flag=True, help="Refuse to replace an older capture.")
_SAMPLED = [
    click.option(
        "--sample",
        metavar="RATIO",
        help="Send the spans of this share of requests, chosen as OpenTelemetry does; a caller's sampled flag takes "
        "precedence.",
    ),
    click.option(
        "--keep",
        metavar="CONDITION",
        help="Send the spans of requests that meet this condition when they end, such as 'tau < 1.5 or error'.",
    ),
    click.option(
        "--keep-buffer",
        metavar="MIB",
        help=f"With --keep: memory for steps of requests that have not ended.  [default: {BUFFER_MIB}]",
    ),
    click.option("--sample-capture", is_flag=True, help="Apply --sample and --keep to the capture, too."),
]


def _apply(options: list[Callable[[Any], Any]], function: F) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def engine_options(function: F) -> F:
    """Flags that decide what the engine is."""
    return _apply(_ENGINE, function)


def sampling_options(function: F) -> F:
    """Flags that decide how requests are sampled."""
    return _apply(_SAMPLING, function)


def output_options(function: F) -> F:
    """Flags that decide where records go, and whose."""
    return _apply([*_OUTPUT, *_PRIVACY, *_SAMPLED], function)


def privacy_options(function: F) -> F:
    """Flags that decide what is left out of what is recorded."""
    return _apply(_PRIVACY, function)


def trace_sampling_options(function: F) -> F:
    """Flags that decide whose spans are kept."""
    return _apply(_SAMPLED, function)


def refuse_others(flag: str, why: str, allowed: Iterable[str]) -> None:
    """Refuse what was given on the command line beside a flag that leaves it without effect. Raises UserError."""
    context = click.get_current_context()
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name not in allowed:
            raise UserError(f"{flag} {why}: leave out {option.opts[-1] if option.opts else option.name}")


def engine_config(flags: dict[str, Any]) -> EngineConfig:
    """Take the engine's flags out of `flags`. Raises UserError for values that do not fit together."""
    given = {field.name: flags.pop(field.name) for field in fields(EngineConfig) if field.name in flags}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def sampling_params(flags: dict[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """Take the sampling flags out of `flags`: the parameters, and how prompts become text (of `prompt_specs`)."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    ends = ("seed", "max_tokens", "stop", "ignore_eos", "stop_token_ids", "min_tokens", "logprobs")
    given = {name: flags.pop(name) for name in (*names, *ends)}
    given["structured_outputs"] = structured_outputs(flags)
    raw, template = flags.pop("raw"), flags.pop("chat_template_kwargs")
    if raw and template is not None:
        raise UserError("--chat-template-kwargs are for the chat template, which --raw leaves out: give one of them")
    how = {"raw": raw, "template": {} if template is None else read_template(template)}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None}), how


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

    `unattended`: it may be started where nobody looks, and should run on.
    """
    no_clobber, on_full = flags.pop("no_clobber", False), flags.pop("on_full")
    existing = Existing.NEW_NAME if unattended else Existing.REFUSE if no_clobber else Existing.REPLACE
    if capture is not None:
        check_output(capture, "-o", inputs, CAPTURE, existing)
    elif no_clobber or on_full is not None:
        raise UserError(f"{'--no-clobber' if no_clobber else '--on-full'} is about a capture: give -o FILE")
    endpoint = flags.pop("otlp_endpoint")
    for name in ENDPOINTS:
        if os.environ.get(name):
            checked_endpoint(os.environ[name], name)
    if flags["metrics_port"] is not None:
        check_metrics_port(flags["metrics_port"])
    sent = endpoint is not None or any(map(os.environ.get, ENDPOINTS))
    return OutputOptions(
        sampling=trace_sampling(flags, capture=capture is not None, sent=sent),
        capture=capture,
        otlp_endpoint=None if endpoint is None else checked_endpoint(endpoint, "--otlp-endpoint"),
        otlp_protocol=flags.pop("otlp_protocol"),
        level=SpanLevel(flags.pop("trace_level")),
        metrics_port=flags.pop("metrics_port"),
        privacy=asked_privacy(flags),
        existing=existing,
        drops=on_full == "drop" or (unattended and on_full is None),
    )


def asked_privacy(flags: dict[str, Any]) -> Privacy:
    """Take the flags of privacy out of `flags`; what a level does not do is said."""
    asked = Privacy.of(no_text=flags.pop("no_text"), no_tokens=flags.pop("no_tokens"))
    if asked.remark:
        say(asked.remark)
    return asked


def trace_sampling(flags: dict[str, Any], *, capture: bool, sent: bool) -> TraceSampling:
    """Take the flags of trace sampling out of `flags`. `sent`: whether spans are. Raises UserError."""
    given = read_sampling(
        flags.pop("sample"), flags.pop("keep"), flags.pop("keep_buffer"), captures=flags.pop("sample_capture")
    )
    if given.captures and not (given.is_on and capture):
        raise UserError("--sample-capture needs a capture, and --sample or --keep to say which requests it holds")
    if given.is_on and not sent and not given.captures:
        name = "--sample" if given.keep is None else "--keep"
        raise UserError(
            f"{name} is about spans that are sent: give --otlp-endpoint"
            + (", or --sample-capture to leave requests out of the capture" if capture else "")
        )
    return given


def checked_endpoint(text: str, name: str) -> str:
    """An OTLP endpoint as a URL of http or https. Raises UserError."""
    url = text if "://" in text else f"http://{text}"
    checked_url(url, f"{name} {{}}: write http://HOST:PORT or https://HOST:PORT")
    return url
