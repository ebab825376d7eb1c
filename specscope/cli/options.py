"""What a verb takes: numbers, X, and the flags that several share, with the objects they become.

What X is, one rule says for every verb that reads.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from msgspec import Meta

from specscope.cli.streams import say
from specscope.engine.config import EngineConfig, named_code
from specscope.engine.prompts import PromptSpec, prompt_specs, read_template
from specscope.errors import UserError
from specscope.trace.checked import Flag, Port, base_of, checked, checked_url, flags_of, required_types, without_login
from specscope.trace.files import CAPTURE, Existing, check_output, read_lines
from specscope.trace.inside import settings
from specscope.trace.kinds import ReadAs, kind_of, start_of
from specscope.trace.record.params import LONGEST_SCHEMA, SamplingParams, StructuredOutputs
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.vocabulary import STANDARD_INPUT, printable
from specscope.trace.stored import CaptureSource, StoreAddress
from specscope.trace.wire.outputs import ENDPOINTS, OutputOptions, check_metrics_port, named_endpoint
from specscope.trace.wire.sampling import read_ratio
from specscope.trace.wire.spans import SpanLevel

_FORMS = {int: r"[+-]?[0-9]{1,40}", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}
X_RULE = """X or CAPTURE is a file (its first bytes show whether it is a capture, a log, a metrics page, results or
prompts), FILE#REQUEST@STEP (a step in a capture), http://HOST:16686/trace/ID (a trace in Jaeger or Tempo), any other
URL (a metrics page), a debugger's socket, or - (standard input)."""


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click alone
    """A flag's number. Raises UserError that names the flag. Click's own types accept nan, 1_000 and any digits."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401
        """`kind`: an Annotated int or float with its bounds."""
        self.kind = kind
        self.base: type = get_args(kind)[0]
        self.name = "integer" if self.base is int else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """The number in a text; a default is checked as it is."""
        if isinstance(value, str) and re.fullmatch(_FORMS[self.base], value):
            value = self.base(value)
        return checked(value, self.kind, param.opts[0] if param is not None else "the number")


def whole_from(smallest: int, largest: int) -> Number:
    return Number(Annotated[int, Meta(ge=smallest, le=largest, description=f"between {smallest} and {largest}")])


def real_from(smallest: float, largest: float) -> Number:
    return Number(Annotated[float, Meta(ge=smallest, le=largest, description=f"between {smallest:g} and {largest:g}")])


class What(Enum):
    """What X is, and what a verb says that does not take it."""

    TRACE = "{x} is the address of a trace: specscope open {x} shows it"
    PAGE = "{x} is a metrics page: specscope watch {x} reads it"
    INPUT = "- is standard input: give a file"
    SOCKET = "{x} is a socket: specscope debug {x} attaches to the engine behind it"
    RECORDING = "{x} is a capture: specscope open {x} shows it"
    FILE = "{x} is a file"
    MISSING = "there is no file {x}; a prompt contains spaces or is one plain word"
    WORDS = "{x} is a prompt: specscope run takes it"

    @staticmethod
    def of(text: str) -> What:
        """What an argument is. A word that names no file is a prompt if it has no slash and no suffix."""
        if isinstance(text, CaptureSource):
            return What.RECORDING
        if text == "-":
            return What.INPUT
        words = any(map(str.isspace, text))
        if StoreAddress.is_one(text) and not words:
            with suppress(UserError):
                StoreAddress.read(text)
                return What.TRACE
            return What.PAGE
        file, sign, _ = (text, "", "") if os.path.exists(text) else text.rpartition("#")
        if os.path.exists(file):
            if stat.S_ISSOCK(os.stat(file).st_mode):
                return What.SOCKET
            kind = kind_of(start_of(file))
            return What.RECORDING if kind is not None and kind.reader is ReadAs.CAPTURES else What.FILE
        is_path = "/" in text or Path(text).suffix or sign
        return What.MISSING if is_path and not words else What.WORDS


class X(click.ParamType):  # type: ignore[type-arg]
    """X, as far as a verb takes it. Reading a file reports what is wrong with it."""

    name = "file"

    def __init__(self, *takes: What, place: bool = False) -> None:
        """`place`: whether #REQUEST@STEP may follow the address of a trace."""
        self.takes, self._place = takes, place

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As click calls it: the address of a trace as one, and what is piped in as a file that holds it."""
        what = What.RECORDING if isinstance(value, StoreAddress) else What.of(value)
        if what is What.PAGE and re.search(r":16686(/search.*|/)?$", value):
            name = without_login(value)
            raise UserError(f"{name} is Jaeger's start page: open a trace there and give its address (.../trace/ID)")
        if what not in self.takes:
            if what is What.PAGE:
                StoreAddress.read(value)  # raises
            raise UserError(what.value.format(x=printable(value)))
        if what is What.TRACE:
            address = StoreAddress.read(value)
            if address.place and not self._place:
                raise UserError(
                    f"{address}#{printable(address.place)} names a place: give the address of the whole trace"
                )
            return address
        file, sign, step = value.rpartition("@")
        if sign and not os.path.exists(value) and os.path.isfile(file):
            raise UserError(f"a step is written {printable(file)}#REQUEST@{printable(step)}")
        if What.TRACE in self.takes and StoreAddress.lacks_scheme(value) and not os.path.exists(value):
            raise UserError(f"there is no file {printable(value)}; the address of a trace begins with http://")
        if what is What.INPUT and What.MISSING in self.takes and What.TRACE in self.takes:
            return value if ctx is None or ctx.resilient_parsing else _spooled()
        return value


def _spooled() -> CaptureSource:
    """Standard input, as a file that is deleted with the process: a recording is read more than once."""
    number, name = tempfile.mkstemp(prefix="specscope-")
    atexit.register(lambda: Path(name).unlink(missing_ok=True))
    with open(number, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return CaptureSource(STANDARD_INPUT, Path(name))


RECORDED = X(*(what for what in What if what not in (What.SOCKET, What.PAGE)))
PLACE = X(*RECORDED.takes, place=True)
FIGURES = X(*RECORDED.takes, What.PAGE)  # of a metrics page, one reading
PROMPT = X(What.INPUT, What.RECORDING, What.FILE, What.WORDS)  # of a recording, whoever reads prompts says what it is
DEBUGGED = X(*PROMPT.takes, What.TRACE, What.SOCKET, place=True)
WATCHED = X(What.PAGE, What.INPUT, What.RECORDING, What.FILE, What.MISSING, What.WORDS)
F = TypeVar("F", bound=Callable[..., Any])


class Option(click.Option):
    """A flag, with its heading in --help-all, and whether --help shows it: those that most people use."""

    def __init__(self, *names: Any, group: str = "", usual: bool = True, **how: Any) -> None:  # noqa: ANN401
        super().__init__(*names, **how)
        self.group, self.usual = group, usual

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """What holds the value that is wrong: its flag, or its variable."""
        by_variable = ctx is not None and ctx.get_parameter_source(self.name or "") is ParameterSource.ENVIRONMENT
        return f"{self.envvar}" if by_variable else super().get_error_hint(ctx)


def flag(spelled: str, about: str, kind: Any = None, **how: Any) -> Callable[[F], F]:  # noqa: ANN401
    """A flag: its names and what stands for its value, as in "-o,--output FILE"; without value and type, a switch."""
    names, _, metavar = spelled.partition(" ")
    how = {"show_default": "default" in how, "is_flag": None if metavar or kind else True, **how}
    return click.option(*names.split(","), cls=Option, type=kind, metavar=metavar or None, help=about, **how)


def _option(name: str, declared: Flag, kind: Any, group: str) -> Callable[[Any], Any]:  # noqa: ANN401
    """The flag of a field that declares one; its value is None where it is not given."""
    spelled, base = declared.name or f"--{name.replace('_', '-')}", base_of(kind)
    how: dict[str, Any] = {"group": group, "usual": name in USUAL, "envvar": VARIABLES.get(name)}
    if base is bool:
        spelled = f"{spelled}/--no-{spelled[2:]}" if declared.negated else spelled
        return flag(f"{spelled},{name}", declared.help, is_flag=True, default=None, show_default=False, **how)
    several = get_origin(base) is tuple
    item = get_args(base)[0] if several else kind
    number = Number(item) if base_of(item) in (int, float) else None
    of_these = click.Choice(declared.choices) if declared.choices else None
    shown = f"{spelled},{name} {declared.metavar}".rstrip()
    return flag(shown, declared.help, of_these or number, multiple=several, is_flag=None, **how)


def _options(kind: type, group: str) -> list[Callable[[Any], Any]]:
    types = required_types(kind)
    return [_option(name, declared, types[name], group) for name, declared in flags_of(kind).items()]


USUAL = {"target", "drafter", "draft_model", "tree", "rule", "temperature", "top_p", "top_k", "seed", "max_tokens"}
USUAL |= {"max_batch", "disable_above", "device", "dtype", "threads"}
VARIABLES = {"evidence": settings.EVIDENCE}  # whose value a field has where its flag is not given
_rare = partial(flag, group="sampling", usual=False)
_SAMPLING = [
    *_options(SamplingParams, "sampling"),
    _rare("--json-schema FILE", "The output must be JSON that fits this schema, given as a file or as text."),
    _rare("--json-object", "The output must be a JSON object.", default=None),
    _rare("--regex REGEX", "The whole output must match this regular expression."),
    _rare("--choice TEXT", "The output must be one of these; give the flag once for each.", multiple=True),
    _rare("--grammar FILE", "The output must follow this EBNF grammar, given as a file or as text."),
    flag("--raw", "Do not apply the chat template.", group="sampling"),
    _rare("--chat-template-kwargs JSON", "Variables of the chat template, such as '{\"enable_thinking\": false}'."),
]
# What is sent: a flag, else its variable, in every verb alike
_sent = partial(flag, group="output")
_rarely = partial(_sent, usual=False)
endpoint_option = _sent("--otlp-endpoint URL", "Send spans here, e.g. http://localhost:4317.", envvar=settings.ENDPOINT)
service_option = _rarely(
    "--service-name NAME",
    "Service name of request spans; engine steps are under 'NAME engine'.  [default: $OTEL_SERVICE_NAME, else "
    "specscope]",
)
trace_level_option = _rarely(
    "--trace-level",
    "What to send to the endpoint; requests: one span per request, with its figures. Captures always hold trees.",
    click.Choice([level.value for level in SpanLevel]),
    default="trees",
    envvar=settings.LEVEL,
)
_OUTPUT = [
    endpoint_option,
    _rarely(
        "--otlp-protocol",
        "[default: http/protobuf at port 4318, else grpc]",
        click.Choice(["grpc", "http/protobuf"]),
        envvar=settings.PROTOCOL,
    ),
    service_option,
    trace_level_option,
    _rarely(
        "--on-full",
        "If the capture's disk is full: end the run, or drop steps and count them.  [default: stop; drop for serve]",
        click.Choice(["stop", "drop"]),
    ),
    _sent("--metrics-port PORT", "Serve Prometheus metrics on this port.", Number(Port)),
]
_PRIVACY = [
    _sent("--no-text", "Leave out all text, wherever records go. Token ids stay.", envvar=settings.NO_TEXT),
    _sent("--no-tokens", "Leave out token ids too. Shapes, numbers and times stay.", envvar=settings.NO_TOKENS),
]
own_drafter_option = flag("--drafter NAME", "The run's drafter, if it is your module:Class.")
file_option = flag("--file FILE", "Read prompts from a file of lines or JSON. Standard input is -.")
no_clobber_option = flag("--no-clobber", "Refuse to replace an older capture.")
target_option = flag("--target MODEL", "Target model.  [default: the one in the capture]")
head_option = flag("--draft-model MODEL", "Draft model or EAGLE head.  [default: the one in the capture]")
json_option = flag("--json,as_json", "Print JSON.")
branch_option = flag("--branch N", "Read this branch of the run.  [default: the last]", whole_from(0, 2**31))
sample_option = _rarely(
    "--sample,ratio RATIO",
    "Send the spans of this share of requests, chosen as OpenTelemetry does; a caller's sampled flag takes precedence.",
    envvar=settings.SAMPLE,
)


def apply(options: Sequence[Callable[[Any], Any]], function: F) -> F:
    """A function with these options, the first of them above the others."""
    for option in reversed(options):
        function = option(function)
    return function


# Of the engine, of how requests are sampled, of where records go, of what is left out of them, of where spans go
engine_options = partial(apply, _options(EngineConfig, "engine"))
sampling_options = partial(apply, _SAMPLING)
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
        specs = prompt_specs(prompts, file, PromptSpec("", params, **how), lambda x: say(f"specscope: {x}"), **more)
        asked = ((spec.params.structured_outputs, spec.place) for spec in reversed(specs))
        if forms := {form: "" if form == params.structured_outputs else place for form, place in asked if form}:
            from specscope.speculate.structured.compiler import check_forms

            check_forms(forms)
    except UserError as error:
        if privacy is Privacy.EVERYTHING:
            raise
        raise UserError(re.sub(r"'[^']*'|\"[^\"]*\"", "a value that is not shown", str(error))) from None
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
    sent = endpoint is not None or named_endpoint() is not None
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
