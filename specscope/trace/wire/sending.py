"""An OTLP endpoint behind an official exporter: each export is tried once, and where it fails it is known why.

By themselves exporters try for seconds, and tell only their log why they fail: a run that ends must not wait for them,
and its user reads no log.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import specscope
from specscope.errors import UserError
from specscope.trace.checked import checked_url
from specscope.trace.history.wording import plural
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary, printable
from specscope.trace.wire.sampling import Sampler, sampling_text
from specscope.trace.wire.spans import SCOPE, Encoder, Span, SpanLevel, brief, engine_resource, resource_attributes

TIMEOUT = 10.0  # seconds that one export may take
LONGEST = 200  # characters of what an endpoint or a library says
# They name what makes the HTTP exporter's session
CREDENTIALS = [f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{kind}CREDENTIAL_PROVIDER" for kind in ("", "TRACES_")]
PROTOCOLS = ("grpc", "http/protobuf")
PAGE_URL = "SPECSCOPE_PAGE_URL"  # where pages of runs lie: each decode_step tells its place in one
ANSWERS = ("", "application/x-protobuf", "application/json")  # content types of an endpoint's; "": it names none
PASSING = {429, 502, 503, 504, "CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}

SILENT = (  # what libraries say where nobody answered, gRPC also with a status, and our words
    ("parsing http/2", "{} speaks HTTP, not gRPC: give --otlp-protocol http/protobuf"),
    ("connection refused", "nothing listens at {} (connection refused)"),
    ("resol(v|ution)|name or service not known|name not found", "the host name of {} is not known"),
    ("timed ?out|timeout|deadline exceeded", "{} did not answer in time"),
)


class NotSent(Exception):  # noqa: N818 - no exporter knows it, so none tries again where it is raised
    """Why an export failed. `passes`: the same one may succeed later; `status`: HTTP's number or gRPC's name."""

    def __init__(self, text: str, passes: bool = False, status: object = None) -> None:
        super().__init__(text)
        self.passes, self.status = passes, status


class OtlpEndpoint:
    """Where an official exporter sends spans. `where`: HOST:PORT, for messages."""

    def __init__(self, address: str | None, protocol: str | None) -> None:
        """None leaves it to the OTEL_EXPORTER_OTLP_* variables. Raises UserError and ValueError."""
        if "://" not in (text := address or variable("ENDPOINT") or "http://localhost"):
            is_secure = address is None and (variable("CERTIFICATE") or variable("INSECURE") == "false")
            text = address = f"http{'s' * bool(is_secure)}://{text}"
        url = urlsplit(text)
        is_path = url.path.rstrip("/").endswith("/v1/traces")
        kind = protocol or variable("PROTOCOL") or PROTOCOLS[address is not None and (is_path or url.port == 4318)]
        if kind not in PROTOCOLS:
            raise UserError(f"unknown OTLP protocol {kind!r}: use {' or '.join(PROTOCOLS)}")
        place = url.netloc.rpartition("@")[2]
        self.where = printable(place if url.port or kind != "grpc" else f"{place}:4317")
        if kind == "grpc" and "@" in url.netloc:  # it would take that for a part of the host's name
            raise UserError(
                f"the address of the OTLP endpoint {self.where} contains a login, which gRPC does not send: remove it "
                "and set OTEL_EXPORTER_OTLP_HEADERS (authorization=Basic ...), or use http/protobuf"
            )
        if kind == "grpc":
            from grpc import StatusCode
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            once = (StatusCode.OK,)  # no error: with nothing here it takes its own
            self.exporter: Any = OTLPSpanExporter(address, timeout=TIMEOUT, retryable_error_codes=once)
        else:
            self.exporter = _http(address, is_path, self.where)
        self.exporter._metrics = self
        self.error: Exception | None = None  # this and the next are what an exporter tells its metrics
        self.error_attrs: dict[str, Any] | None = None  # a status

    @contextmanager
    def export_operation(self, count: int) -> Iterator[OtlpEndpoint]:
        """Around an export, in place of an exporter's metrics."""
        self.error = self.error_attrs = None
        yield self

    def send(self, spans: Sequence[ReadableSpan]) -> NotSent | None:
        """Try once; why it failed, None where it did not."""
        try:
            if self.exporter.export(spans) is SpanExportResult.SUCCESS:
                return None
            error = self.error
        except Exception as raised:  # of the encoding
            error = raised
        if isinstance(error, NotSent):
            return error
        details = getattr(error, "details", None)  # gRPC's
        if details is None and error is not None and not isinstance(error, OSError):
            return NotSent(f"{type(error).__name__}: {printable(' '.join(str(error).split()))[:LONGEST]}")
        status = next(iter((self.error_attrs or {}).values()), None)
        return failure_of(status, str(details() if details else error or ""), self.where)


def _http(address: str | None, is_path: bool, where: str) -> Any:  # noqa: ANN401
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    class OneTry(requests.Session):
        def request(self, *words: Any, **named: Any) -> requests.Response:  # noqa: ANN401
            try:
                response = super().request(*words, **named)
            except requests.RequestException as error:
                raise failure_of(None, str(error), where) from error
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
            if response.status_code // 100 != 2:
                raise failure_of(response.status_code, response.reason or "", where)
            if response.content and kind.lower() not in ANSWERS:  # a page: whose port it is, or where to log in
                raise failure_of(response.status_code, kind, where)
            return response

    if address is not None and not is_path:
        address = address.rstrip("/") + "/v1/traces"
    session = None if any(map(os.environ.get, CREDENTIALS)) else OneTry()
    return OTLPSpanExporter(endpoint=address, timeout=TIMEOUT, session=session)


def failure_of(status: object, details: str, where: str) -> NotSent:
    """In words. `status`: None where there was no answer. `details`: why, or the content type of a good answer."""
    passes, said = status is None or status in PASSING, printable(" ".join(details.split()))[:LONGEST]
    for pattern, words in SILENT if status in (None, "UNAVAILABLE", "DEADLINE_EXCEEDED") else ():
        if re.search(pattern, details, re.IGNORECASE):
            return NotSent(words.format(where), passes)
    if status is None:
        return NotSent(f"{where} cannot be reached: {said}".rstrip(": "), passes)
    if isinstance(status, int) and status // 100 == 2:
        return NotSent(f"{where} is not an OTLP endpoint: it answered {said}", False, status)
    return NotSent(f"{where} refused the spans: {status} {said}".rstrip(), passes, status)


def variable(name: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")


_PAIRS = r"(\s*[^=,\s]+\s*=[^,]*(,|$))*", "NAME=VALUE,NAME=VALUE"
READABLE = {  # variables whose values exporters and the SDK leave out without a word: how they are written
    "OTEL_EXPORTER_OTLP_HEADERS": _PAIRS,
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": _PAIRS,
    "OTEL_RESOURCE_ATTRIBUTES": _PAIRS,
    "OTEL_EXPORTER_OTLP_COMPRESSION": ("(?i)|none|gzip|deflate", "gzip"),
}


def unread() -> list[str]:
    """A line on each variable that cannot be read, without its value, which may be secret."""
    values = [(name, os.environ.get(name, ""), *how) for name, how in READABLE.items()]
    bad = [(name, form) for name, value, pattern, form in values if not re.fullmatch(pattern, value.strip())]
    return [f"{name} cannot be read, so it is left out: write {form}" for name, form in bad]


QUEUED = 2048  # spans that wait, as in the SDK's own processor
UNKNOWN = 2.0  # seconds after which nobody waits any more for an endpoint that has not answered the last try
PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds after a failure, twice as many after the next


class Sender:
    """Sends batches in their order.

    While the endpoint answers, `put` waits where too much is queued. While it does not, the oldest spans give way, so
    that one that comes back gets what was queued. `close` waits for what is sent in time and gives up the rest.
    """

    def __init__(self, endpoint: str | None, protocol: str | None = None) -> None:
        self.lost: Counter[str] = Counter()  # spans that were not sent, by why
        self._endpoint = OtlpEndpoint(endpoint, protocol)
        self._batches: deque[Sequence[ReadableSpan]] = deque()
        self._sending: Sequence[ReadableSpan] = ()
        self._began = 0.0  # the try that is under way
        self._failure: NotSent | None = None  # of the last try
        self._answers = False  # whether that succeeded
        self._pause = PAUSE
        self._closing = self._ended = False
        self._change = threading.Condition()
        threading.Thread(target=self._run, name="specscope-sender", daemon=True).start()

    @property
    def queued(self) -> int:
        return sum(map(len, self._batches))

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Take a batch. Waits no longer than an endpoint may take to answer."""
        with self._change:
            self._wait(lambda: self._failure is not None or self.queued + len(spans) <= QUEUED)
            while self._batches and self.queued + len(spans) > QUEUED:
                self._lose(self._batches.popleft())
            self._batches.append(spans)
            self._change.notify_all()

    def close(self) -> None:
        """Send what is queued while the endpoint takes it; what it does not take is counted."""
        with self._change:
            self._closing = True
            self._change.notify_all()
            self._wait(lambda: self._ended)
            if not self._ended:
                self._ended, self._failure = True, None
                self._lose(self._sending, *self._batches)
        self._endpoint.exporter.shutdown()

    def _wait(self, true: Callable[[], bool]) -> None:
        """Wait until it is true, or the try that is under way takes too long."""
        now = time.monotonic()
        while not true() and (left := (self._began if self._sending else now) + self._patience - time.monotonic()) > 0:
            self._change.wait(left)

    @property
    def _patience(self) -> float:
        return TIMEOUT if self._answers else UNKNOWN

    def _lose(self, *batches: Sequence[ReadableSpan]) -> None:
        why = self._failure or f"{self._endpoint.where} did not answer in {self._patience:.0f} s"
        self.lost[str(why)] += sum(map(len, batches))

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._failure is None or self._closing, self._pause)
                self._change.wait_for(lambda: self._batches or self._closing)
                self._ended = self._ended or not self._batches
                self._change.notify_all()
                if self._ended:
                    return
                batch = self._sending = self._batches.popleft()
                self._began = time.monotonic()
            failure = self._endpoint.send(batch)
            with self._change:
                if self._ended:
                    return
                # At the end it is tried again only where an endpoint that answers dropped a connection
                again, self._sending = self._answers or not self._closing, ()
                self._pause = min(2 * self._pause, LONGEST_PAUSE) if self._failure else PAUSE
                self._failure, self._answers = failure, failure is None
                has_room = self.queued + len(batch) <= QUEUED  # else later ones took its place: it is the oldest
                if failure is not None and failure.passes and again and has_room:
                    self._batches.appendleft(batch)
                elif failure is not None:
                    self._lose(batch)
                    while self._closing and failure.passes and failure.status is None and self._batches:
                        self._lose(self._batches.popleft())
                self._change.notify_all()


BATCH, BATCH_BYTES = 128, 4 * 2**20 - 2**16  # of an export: spans, and bytes without its resources
_FLAGS = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(SCOPE, specscope.__version__)


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """A Span as the SDK's ReadableSpan, for any OpenTelemetry exporter. Built by hand: 10 times cheaper."""
    return ReadableSpan(
        name=span.name,
        context=SpanContext(span.trace, span.id, False, _FLAGS),
        parent=SpanContext(span.trace, span.parent, False, _FLAGS) if span.parent else None,
        resource=resource,
        attributes=span.attributes,
        links=[Link(SpanContext(trace, span_id, False, _FLAGS)) for trace, span_id in span.links],
        kind=SpanKind(span.kind - 1),  # OTLP's numbers begin with "unspecified"
        status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error or None),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def most_bytes(span: Span) -> int:
    """No fewer than a span takes as protobuf: a number takes 13 bytes at most, a character four."""
    size = 200 + 40 * len(span.links) + 4 * (len(span.name) + len(span.error or "") + sum(map(len, span.attributes)))
    for value in span.attributes.values():
        if isinstance(value, list | tuple):
            size += 24 + 13 * len(value) + (4 * sum(map(len, value)) if value and isinstance(value[0], str) else 0)
        else:
            size += 24 + (4 * len(value) if isinstance(value, str) else 0)
    return size


def _detected(attributes: Mapping[str, Any]) -> Resource:
    """A resource, with what OTEL_EXPERIMENTAL_RESOURCE_DETECTORS asks for, and without the SDK, which made no span."""
    whole = Resource.create(attributes).attributes
    return Resource({name: value for name, value in whole.items() if not name.startswith("telemetry.sdk.")})


def page_of(template: str, run_id: str) -> str:
    """The address of a run's page, such as https://host/{run}.html names it; "" without one. Raises UserError."""
    if template and "{run}" not in template:
        raise UserError(f"{PAGE_URL} {template}: write {{run}} where the run's id stands")
    if template:
        checked_url(template, f"{PAGE_URL} {{}}: write an address, such as https://host/{{{{run}}}}.html")
    return template.replace("{run}", run_id)


class SpanSink:
    def __init__(
        self,
        sender: Sender,
        run: RunInfo,
        vocabulary: Vocabulary,
        level: SpanLevel,
        service: str = "",
        ratio: float | None = None,
    ) -> None:
        """`service`: its name, as `resource_attributes` has it. `ratio`: the share of requests whose spans are sent."""
        self.sampler = None if ratio is None else Sampler(run.run_id, ratio)
        run = run if ratio is None else replace(run, sampling=sampling_text(ratio))
        self._sender = sender
        self._encoder = Encoder(run, vocabulary, level)
        resource = resource_attributes(run, service)
        short = brief(resource)
        self._resources = _detected(short), _detected(engine_resource(short))
        # What the resource has a digest of; it goes with the first span
        has_steps = level in (SpanLevel.STEPS, SpanLevel.TREES)
        self._once = {name: resource[name] for name in (DRAFT_TOKENS,) if has_steps and name in resource}
        self._page = page_of(os.environ.get(PAGE_URL, ""), run.run_id)
        self._batch: list[ReadableSpan] = []
        self._bytes = 0  # of it, at most

    def __call__(self, record: StepRecord) -> None:
        """Take a record; spans go out in batches, and at the latest when the engine rests: the bus calls `flush`."""
        sampled = record if self.sampler is None else self.sampler(record)
        for span in () if sampled is None else self._encoder.encode(sampled):
            if self._page and span.name == "decode_step":
                request, step = (span.attributes[f"specscope.request.{name}"] for name in ("id", "step"))
                span.attributes["specscope.page"] = f"{self._page}#{quote(request)}@{step}"
            if self._once:
                span, self._once = span._replace(attributes=span.attributes | self._once), {}
            size = most_bytes(span)
            if len(self._batch) >= BATCH or self._bytes + size > BATCH_BYTES:
                self.flush()
            self._batch.append(readable(span, self._resources[span.of_engine]))
            self._bytes += size
        if sampled is not None and sampled.finished:
            self.flush()

    @property
    def sampled(self) -> str:
        return "" if self.sampler is None else self.sampler.text

    def losses(self) -> list[str]:
        lost = self._sender.lost.most_common()
        return [*unread(), *(f"{plural(count, 'span')} not sent: {why}" for why, count in lost)]

    def flush(self) -> None:
        if self._batch:
            self._sender.put(self._batch)
            self._batch, self._bytes = [], 0

    def close(self) -> None:
        self.flush()
        self._sender.close()
