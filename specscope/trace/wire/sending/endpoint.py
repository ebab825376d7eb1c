"""An OTLP endpoint behind an official exporter: each export is tried once, and where it fails it is known why.

The exporters try again by themselves, for seconds, and say in their log alone what happened. Here neither is of use: a
run that ends must not wait for them, and its user reads no log. So they are given what makes them fail at once, and
what they tell their own metrics is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from specscope.errors import UserError
from specscope.trace.record.vocabulary import printable

TIMEOUT = 10.0  # seconds that one export may take
UNKNOWN = 2.0  # seconds after which nobody waits any more for an endpoint that has not answered yet, or not lately
LONGEST = 200  # characters of what an endpoint or a library says
CREDENTIALS = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}CREDENTIAL_PROVIDER"  # names what makes the HTTP exporter's session
ANSWERS = ("", "application/x-protobuf", "application/json")  # content types of an endpoint's; "": it names none
PASSING = {429, 502, 503, 504, "CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}


@dataclass(frozen=True)
class NotSent:
    """Why an export failed."""

    text: str
    passes: bool = False  # whether the same export may succeed later
    status: object = None  # HTTP's number or gRPC's name, where the endpoint has answered


@dataclass
class LastExport:
    """Takes the place of an exporter's own metrics: what it tells them of the last export."""

    error: Exception | None = None
    error_attrs: dict[str, Any] | None = None  # a status

    @contextmanager
    def export_operation(self, count: int) -> Iterator[LastExport]:
        """Around an export, which leaves here why it failed."""
        self.error = self.error_attrs = None
        yield self

    def failure(self, where: str) -> NotSent:
        """Why it failed, in words. `where`: the endpoint."""
        error, status = self.error, next(iter((self.error_attrs or {}).values()), None)
        if isinstance(error, _NotSentError):
            return failure_of(error.status, str(error), where)
        if (details := getattr(error, "details", None)) is not None:  # gRPC's
            return failure_of(status, str(details()), where)
        if error is None or isinstance(error, OSError):
            return failure_of(status, str(error or ""), where)
        return NotSent(f"{type(error).__name__}: {_cut(str(error))}")


class OtlpEndpoint:
    """Where an official exporter sends spans. `where`: HOST:PORT, for messages."""

    def __init__(self, exporter: Any, where: str) -> None:  # noqa: ANN401
        self.where = where
        self._exporter = exporter
        self._last = exporter._metrics = LastExport()

    def send(self, spans: Sequence[ReadableSpan]) -> NotSent | None:
        """Try once; why it failed, None where it did not."""
        try:
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                return None
        except Exception as error:  # of the encoding
            return NotSent(f"{type(error).__name__}: {_cut(str(error))}")
        return self._last.failure(self.where)

    def close(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()


def failure_of(status: object, details: str, where: str) -> NotSent:
    """In words.

    `status`: None where there was no answer. `details`: why, of the library or the endpoint; where that seemed to take
    them, the content type of its answer.
    """
    text = details.lower()
    passes = status is None or status in PASSING
    if status is None or status == "UNAVAILABLE":  # gRPC's for all that is no answer, and for a busy collector
        if "connection refused" in text:
            return NotSent(f"nobody listens at {where} (connection refused)", passes)
        if re.search("resol(v|ution)|name or service not known|name not found", text):
            return NotSent(f"the host name of {where} is not known", passes)
    if status == "DEADLINE_EXCEEDED" or (status in (None, "UNAVAILABLE") and re.search("timed ?out|timeout", text)):
        return NotSent(f"{where} did not answer in time", passes)
    if status is None:
        return NotSent(f"{where} cannot be reached: {_cut(details)}".rstrip(": "), passes)
    if isinstance(status, int) and status // 100 == 2:
        return NotSent(f"{where} is no OTLP endpoint: it answered with {_cut(details)}", False, status)
    return NotSent(f"{where} refused them: {_cut(f'{status} {details}')}", passes, status)


def silence(where: str, seconds: float) -> NotSent:
    """Where there is no answer after so long."""
    return NotSent(f"{where} did not answer in {seconds:.0f} s", passes=True)


def one_try(protocol: str) -> dict[str, Any]:
    """What an exporter is made with so that it does not try again by itself."""
    if protocol == "grpc":
        from grpc import StatusCode

        return {"retryable_error_codes": (StatusCode.OK,)}  # none: with nothing here it takes its own
    provided = any(os.environ.get(CREDENTIALS.format(kind)) for kind in ("", "TRACES_"))
    return {"session": None if provided else _session()}


def place_of(endpoint: str | None, protocol: str) -> str:
    """HOST:PORT of an endpoint, for messages. None: of the environment's.

    Raises UserError for one with a login by gRPC, which would take that for a part of the host's name.
    """
    names = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    text = endpoint or next(filter(None, map(os.environ.get, names)), "localhost")
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        host, port = url.hostname or "", url.port or (4317 if protocol == "grpc" else None)
    except ValueError:
        return "the OTLP endpoint"
    host = f"[{host}]" if ":" in host else host
    place = printable(host if port is None else f"{host}:{port}")
    if protocol == "grpc" and "@" in url.netloc:
        raise UserError(
            f"the address of the OTLP endpoint {place} has a login, which gRPC does not send: leave it out and set "
            "OTEL_EXPORTER_OTLP_HEADERS (authorization=Basic ...), or send by http/protobuf"
        )
    return place


def _cut(text: str) -> str:
    return printable(" ".join(text.split()))[:LONGEST].strip()


class _NotSentError(Exception):
    """An HTTP request that brought no success. The exporter does not know it, so it does not try again."""

    def __init__(self, status: int | None, details: str) -> None:
        super().__init__(details)
        self.status = status


def _session() -> Any:  # noqa: ANN401
    import requests

    class OneTry(requests.Session):
        def request(self, *words: Any, **named: Any) -> requests.Response:  # noqa: ANN401
            try:
                response = super().request(*words, **named)
            except requests.RequestException as error:
                raise _NotSentError(None, str(error)) from error
            if response.status_code // 100 != 2:
                raise _NotSentError(response.status_code, response.reason or "")
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
            if response.content and kind.lower() not in ANSWERS:  # a page: whose port it is, or where to log in
                raise _NotSentError(response.status_code, kind)
            return response

    return OneTry()
