"""An OTLP trace receiver: gRPC and HTTP in, spans out.

Attaching to an engine elsewhere is this receiver and the span codec: the engine exports with the standard OTLP
exporters, and what arrives here is fed to the decoder that reads captures.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import grpc
from anyio.from_thread import start_blocking_portal
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from specscope.errors import UserError
from specscope.remote.http import Application, Bodies, HttpServer, Limits, Refusal, address, bind, media_type, too_large
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import Parts, read_line
from specscope.trace.wire.otlp_proto import read_request

PATH, SERVICE = "/v1/traces", "opentelemetry.proto.collector.trace.v1.TraceService"
PROTOBUF, JSON = "application/x-protobuf", "application/json"
CODES = {500: grpc.StatusCode.INTERNAL, 503: grpc.StatusCode.UNAVAILABLE}  # by a refusal's status
MAX_CALLS = 8  # exports that are received over gRPC at once
# The SDK sends 512 spans at a time, and again every five seconds on the same connection
LIMITS = Limits(
    body_bytes=4 * 2**20,  # after decompression as well; gRPC's own limit, which every sender keeps to
    bodies=16,
    connections=64,
    header_seconds=8,
    body_seconds=20,
    silent_seconds=4,
    idle_seconds=60,
)
MOST_OBJECTS = 2**18  # in JSON: a number in an array is one, of 17 bytes at least
GRPC_AGE_MS = 30_000  # a gRPC connection is renewed after this: a call that never sends its export ends with it
GRPC_GRACE_MS = 5_000  # once the calls that were under way have had so long


class Export(NamedTuple):
    """An export as it came, unpacked, and as it was read: ten times larger."""

    body: bytes | bytearray
    parts: Parts

    @property
    def spans(self) -> int:
        """How many it has."""
        return sum(len(spans) for _, spans in self.parts)

    @staticmethod
    def of(body: bytes | bytearray, kind: str) -> Export:
        """Raises ValueError, in one line, for what is no ExportTraceServiceRequest of that kind."""
        try:
            if kind == JSON and body.count(b"{") > MOST_OBJECTS:
                raise ValueError(f"more than {MOST_OBJECTS:,} JSON objects in one export")
            if kind == JSON and body.strip() == b"{}":  # an empty list may be left out: senders look whether we answer
                return Export(body, [])
            return Export(body, read_line(body) if kind == JSON else read_request(body))
        except (DamagedError, DecodeError, ValueError) as error:
            name = "OTLP JSON" if kind == JSON else "OTLP protobuf"
            raise ValueError(" ".join(f"the body is not {name}: {error}".split())[:300]) from None


class Receiver:
    """Listens for OTLP traces and hands every export to `on_spans`, one call at a time, on the receiver's threads.

    `grpc_port` and `http_port`: 0 takes any free port, None leaves that protocol off; after `start` they hold the
    real ports. An export is acknowledged after `on_spans` has returned; one in which it raises is answered with an
    error, and the sender decides whether to try again.
    """

    def __init__(
        self,
        on_spans: Callable[[Export], None],
        host: str = "127.0.0.1",
        grpc_port: int | None = 0,
        http_port: int | None = 0,
        limits: Limits = LIMITS,
        on_refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.on_spans, self._on_refused = on_spans, on_refused
        self.host, self.grpc_port, self.http_port, self.limits = host, grpc_port, http_port, limits
        self._lock = threading.Lock()
        self._parsing = threading.Lock()  # one export at a time: decoded they are many times larger
        self._open = False
        self._grpc: Any = None  # held here: without a reference a gRPC server is collected, and stops
        self._http = ExitStack()

    def start(self) -> Receiver:
        """Listen. Raises UserError where a port cannot be used, and leaves none open."""
        self._open = True
        try:
            if self.grpc_port is not None:
                self._start_grpc(self.grpc_port)
            if self.http_port is not None:
                self._start_http(self.http_port)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop listening; no span is handed over after this returns. May be called twice."""
        with self._lock:
            self._open = False
        server, self._grpc = self._grpc, None
        if server is not None:
            server.stop(grace=1).wait()
        self._http.close()

    def __enter__(self) -> Receiver:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_grpc(self, port: int) -> None:
        server = grpc.server(
            ThreadPoolExecutor(max_workers=MAX_CALLS, thread_name_prefix="specscope-otlp"),
            # Without so_reuseport=0 two receivers would share a port, and each would see half of the spans.
            options=[
                ("grpc.max_receive_message_length", self.limits.body_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.max_connection_age_ms", GRPC_AGE_MS),
                ("grpc.max_connection_age_grace_ms", GRPC_GRACE_MS),
            ],
            maximum_concurrent_rpcs=self.limits.connections,
        )
        # By hand: the generated code would decode an export whole, before any bound
        export = grpc.unary_unary_rpc_method_handler(self._export, None, ExportTraceServiceResponse.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),))
        try:
            self.grpc_port = server.add_insecure_port(address(self.host, port))
        except RuntimeError:
            raise self._cannot_listen("gRPC", port) from None
        server.start()
        self._grpc = server

    def _cannot_listen(self, protocol: str, port: int) -> UserError:
        where = f"{self.host}:{port} for OTLP over {protocol}"
        return UserError(f"cannot listen on {where}: choose another port if this one is in use")

    def _export(self, request: bytes, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        """One export over gRPC, still encoded."""
        try:
            self._take(request, PROTOBUF)
        except Refusal as refusal:
            self._on_refused(refusal.message)
            context.abort(CODES.get(refusal.status, grpc.StatusCode.INVALID_ARGUMENT), refusal.message)
        return ExportTraceServiceResponse()

    def _start_http(self, port: int) -> None:
        try:
            bound = bind(self.host, port)
        except (OSError, OverflowError, UnicodeError):
            raise self._cannot_listen("HTTP", port) from None
        self.http_port = bound.getsockname()[1]
        bodies = Bodies(self.limits, PROTOBUF, JSON)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            answer = await self._answer(Request(scope, receive), bodies)
            await answer(scope, receive, send)

        http = HttpServer(Application(app, self.host, self._refusal, self.limits), bound)
        portal = self._http.enter_context(start_blocking_portal())  # a thread with an event loop
        portal.call(http.start)
        self._http.callback(portal.call, http.close)

    def _refusal(self, refusal: Refusal) -> Response:
        self._on_refused(refusal.message)
        return PlainTextResponse(f"{refusal}\n", refusal.status, refusal.headers)

    async def _answer(self, request: Request, bodies: Bodies) -> Response:
        if (request.method, request.url.path.rstrip("/")) != ("POST", PATH):
            return self._refusal(Refusal(404, f"specscope receives OTLP traces here: POST {PATH}"))
        kind, encoding = media_type(request.headers), request.headers.get("content-encoding", "identity")
        try:
            async with bodies.of(request) as body:
                await asyncio.to_thread(self._take, body, kind, encoding.strip().lower())
        except Refusal as refusal:
            return self._refusal(refusal)
        except ClientDisconnect:
            return self._refusal(Refusal(400, "the body ended early"))
        return Response(b"{}" if kind == JSON else b"", media_type=kind)  # the empty response message

    def _take(self, body: bytes | bytearray, kind: str, encoding: str = "identity") -> None:
        """Read an export and hand it over. Raises Refusal."""
        try:
            with self._parsing:
                export = Export.of(_decompress(body, encoding, self.limits.body_bytes), kind)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        with self._lock:
            if not self._open:
                raise Refusal(503, "the receiver is closed")
            try:
                self.on_spans(export)
            except Exception as error:
                why = f"the spans could not be read: {type(error).__name__}: {error}"
                raise Refusal(500, " ".join(why.split())) from error


def _decompress(body: bytes | bytearray, encoding: str, limit: int) -> bytes | bytearray:
    try:
        if encoding == "gzip":
            body = gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
        elif encoding != "identity":
            raise Refusal(415, "send the body uncompressed, or with gzip")
    except (OSError, EOFError, zlib.error):
        raise Refusal(400, f"the body is not valid {encoding}") from None
    if len(body) > limit:
        raise too_large(limit)
    return body
