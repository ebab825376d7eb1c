"""An OTLP endpoint behind an official exporter: each export is tried once, and where it fails it is known why.

By themselves exporters try for seconds, and tell only their log why they fail: a run that ends must not wait for them,
and its user reads no log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from specscope.errors import UserError
from specscope.trace.record.vocabulary import printable

TIMEOUT = 10.0  # seconds that one export may take
LONGEST = 200  # characters of what an endpoint or a library says
# They name what makes the HTTP exporter's session
CREDENTIALS = [f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{kind}CREDENTIAL_PROVIDER" for kind in ("", "TRACES_")]
PROTOCOLS = ("grpc", "http/protobuf")
ANSWERS = ("", "application/x-protobuf", "application/json")  # content types of an endpoint's; "": it names none
PASSING = {429, 502, 503, 504, "CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}

SILENT = (  # what libraries say where nobody answered, gRPC also with a status, and our words
    ("connection refused", "nobody listens at {} (connection refused)"),
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
        if address is not None and "://" not in address:
            address = f"http://{address}"
        text = address or _variable("ENDPOINT") or "localhost"
        url = urlsplit(text if "://" in text else f"http://{text}")
        is_path = url.path.rstrip("/").endswith("/v1/traces")
        kind = protocol or _variable("PROTOCOL") or PROTOCOLS[address is not None and (is_path or url.port == 4318)]
        if kind not in PROTOCOLS:
            raise UserError(f"unknown OTLP protocol {kind!r}: use {' or '.join(PROTOCOLS)}")
        place = url.netloc.rpartition("@")[2]
        self.where = printable(place if url.port or kind != "grpc" else f"{place}:4317")
        if kind == "grpc" and "@" in url.netloc:  # it would take that for a part of the host's name
            raise UserError(
                f"the address of the OTLP endpoint {self.where} has a login, which gRPC does not send: leave it out "
                "and set OTEL_EXPORTER_OTLP_HEADERS (authorization=Basic ...), or send by http/protobuf"
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
        return NotSent(f"{where} is no OTLP endpoint: it answered with {said}", False, status)
    return NotSent(f"{where} refused them: {status} {said}".rstrip(), passes, status)


def _variable(name: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")


def endpoint_from_environment() -> bool:
    """Whether the OTEL_EXPORTER_OTLP_* variables name an endpoint for traces."""
    return bool(_variable("ENDPOINT"))
