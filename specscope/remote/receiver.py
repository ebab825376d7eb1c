"""An OTLP trace receiver: gRPC and HTTP in, spans out.

Attaching to an engine elsewhere is this receiver and the span codec: the engine exports with the standard OTLP
exporters, and what arrives here is fed to the decoder that reads captures.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from specscope.errors import UserError
from specscope.remote.otlp import JSON, PROTOBUF, Received, parse

PATH = "/v1/traces"
MAX_BODY = 16 * 2**20  # bytes of one export, after decompression; the SDK sends 512 spans at a time
BODIES = 4  # of the largest exports, so many may be under way over HTTP
MAX_CONNECTIONS = 64  # over HTTP
MAX_CALLS = 8  # exports that are received over gRPC at once
POLL_SECONDS = 0.1  # the HTTP server looks this often whether it is to end
IDLE_SECONDS = 60  # an HTTP connection that has sent an export and is silent is closed after this
SILENT_SECONDS = 4  # one that is silent before its first export, or inside of one
HEAD_SECONDS = 8  # a request's line and headers take so long at most
BODY_SECONDS = 20  # and its body so long
GRPC_AGE_MS = 30_000  # a gRPC connection is renewed after this: a call that never sends its export ends with it
GRPC_GRACE_MS = 5_000  # once the calls that were under way have had so long


class Receiver:
    """Listens for OTLP traces and hands every export to `on_spans`, one call at a time, on the receiver's threads.

    `grpc_port` and `http_port`: 0 takes any free port, None leaves that protocol off; after `start` they hold the
    real ports. `received` counts spans handed over, `refused` the exports that could not be read. Listens on the
    loopback interface unless told otherwise. An export is acknowledged after `on_spans` has returned; one in which
    it raises is answered with an error, and the sender decides whether to try again.
    """

    def __init__(
        self,
        on_spans: Callable[[list[Received]], None],
        host: str = "127.0.0.1",
        grpc_port: int | None = 0,
        http_port: int | None = 0,
        max_body: int = MAX_BODY,
    ) -> None:
        self.on_spans = on_spans
        self.host = host
        self.grpc_port = grpc_port
        self.http_port = http_port
        self.max_body = max_body
        self.received = 0
        self.refused = 0
        self._lock = threading.Lock()
        self._parsing = threading.Lock()  # one export at a time: decoded they are many times larger
        self._room = BODIES * max_body  # bytes of bodies that may still come over HTTP
        self._open = False
        self._grpc: Any = None  # held here: without a reference a gRPC server is collected, and stops
        self._http: _HttpServer | None = None

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
        if self._grpc is not None:
            self._grpc.stop(grace=1).wait()
            self._grpc = None
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def __enter__(self) -> Receiver:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def deliver(self, spans: list[Received]) -> None:
        """Hand spans over and count them. Raises what `on_spans` raises, ConnectionError after `close`."""
        with self._lock:
            if not self._open:
                raise ConnectionError("the receiver is closed")
            self.on_spans(spans)
            self.received += len(spans)

    def parse(self, body: bytes, kind: str, encoding: str = "identity") -> list[Received]:
        """The spans of an export. Raises ValueError, or _RefusedError for a body that cannot be unpacked."""
        with self._parsing:
            return parse(_decompress(body, encoding, self.max_body), kind)

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Memory for a body. Raises _RefusedError where others take all that there is."""
        with self._lock:
            if size > self._room:
                raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too much is being received: try again later")
            self._room -= size
        try:
            yield
        finally:
            with self._lock:
                self._room += size

    def _start_grpc(self, port: int) -> None:
        server = grpc.server(
            ThreadPoolExecutor(max_workers=MAX_CALLS, thread_name_prefix="specscope-otlp"),
            interceptors=[_Encoded()],
            # Without so_reuseport=0 two receivers would share a port, and each would see half of the spans.
            options=[
                ("grpc.max_receive_message_length", self.max_body),
                ("grpc.so_reuseport", 0),
                ("grpc.max_connection_age_ms", GRPC_AGE_MS),
                ("grpc.max_connection_age_grace_ms", GRPC_GRACE_MS),
            ],
            maximum_concurrent_rpcs=MAX_CONNECTIONS,
        )
        add_TraceServiceServicer_to_server(_Service(self), server)  # type: ignore[no-untyped-call]
        address = f"[{self.host}]" if ":" in self.host else self.host
        try:
            self.grpc_port = server.add_insecure_port(f"{address}:{port}")
        except RuntimeError:
            raise _cannot_listen("gRPC", self.host, port) from None
        server.start()
        self._grpc = server

    def _start_http(self, port: int) -> None:
        try:
            self._http = _HttpServer(self, self.host, port)
        except (OSError, OverflowError):
            raise _cannot_listen("HTTP", self.host, port) from None
        self.http_port = self._http.server_port
        threading.Thread(
            target=self._http.serve_forever, args=(POLL_SECONDS,), name="specscope-otlp-http", daemon=True
        ).start()


class _Encoded(grpc.ServerInterceptor):  # type: ignore[misc]
    """Hands the service its requests as bytes: the generated code would decode an export whole, before any bound."""

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:  # noqa: ANN401
        """The handler of a call, without what decodes its request."""
        found = continuation(handler_call_details)
        if found is None:  # no method of ours
            return None
        return grpc.unary_unary_rpc_method_handler(found.unary_unary, None, found.response_serializer)


class _Service(TraceServiceServicer):
    """The gRPC service."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: bytes, context: grpc.ServicerContext) -> ExportTraceServiceResponse:  # noqa: N802
        """One export, still encoded."""
        try:
            spans = self._receiver.parse(request, PROTOBUF)
        except ValueError as error:
            self._receiver.refused += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            self._receiver.deliver(spans)
        except ConnectionError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except Exception as error:
            context.abort(grpc.StatusCode.INTERNAL, _cannot_take(error))
        return ExportTraceServiceResponse()


def _cannot_listen(protocol: str, host: str, port: int) -> UserError:
    return UserError(
        f"cannot listen on {host}:{port} for OTLP over {protocol}: choose another port if this one is in use"
    )


def _cannot_take(error: Exception) -> str:
    return " ".join(f"the spans could not be taken: {type(error).__name__}: {error}".split())


class _RefusedError(Exception):
    """An HTTP request that is answered with an error: the status, and one line that says why."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, receiver: Receiver, host: str, port: int) -> None:
        self.receiver = receiver
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host's full name, which can hang where there is no DNS."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class has it
        """A thread for a connection, as long as there are not too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(1)
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """The connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Patience(io.RawIOBase):
    """Reads a socket as long as `allow` said: it raises TimeoutError for one that is silent, and for one too slow."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._silent = 0.0
        self._end = 0.0

    def allow(self, seconds: float, silent: float) -> None:
        """From now on: so long in all, and so long without a byte."""
        self._end, self._silent = time.monotonic() + seconds, silent

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - as the base class has it
        """What has come."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(min(left, self._silent))
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # exporters keep their connection open
    disable_nagle_algorithm = True  # the answer's two small writes would otherwise wait for each other
    server: _HttpServer

    def setup(self) -> None:
        """Read with patience, which has an end."""
        super().setup()
        self.rfile.close()
        self._patience = _Patience(self.connection)
        self.rfile = self._reader = io.BufferedReader(self._patience)
        self._idle = SILENT_SECONDS

    def handle_one_request(self) -> None:
        """Wait for a request, then do not wait long for the rest of it."""
        self._patience.allow(self._idle, self._idle)
        try:
            if not self._reader.peek(1):
                self.close_connection = True
                return
        except OSError:
            self.close_connection = True
            return
        self._idle = IDLE_SECONDS
        self._patience.allow(HEAD_SECONDS, SILENT_SECONDS)
        super().handle_one_request()

    def do_POST(self) -> None:
        """One export."""
        receiver = self.server.receiver
        try:
            with receiver.room(self._length(receiver.max_body)):
                kind, spans = self._read(receiver)
                receiver.deliver(spans)
        except TimeoutError:
            receiver.refused += 1
            self._answer(HTTPStatus.REQUEST_TIMEOUT, "text/plain; charset=utf-8", b"the body did not come in time\n")
        except _RefusedError as refusal:
            receiver.refused += 1
            self._answer(refusal.status, "text/plain; charset=utf-8", f"{refusal}\n".encode())
        except ConnectionError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", f"{error}\n".encode())
        except Exception as error:
            text = _cannot_take(error)
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{text}\n".encode())
        else:
            self._answer(HTTPStatus.OK, kind, b"{}" if kind == JSON else b"")  # the empty response message

    def do_GET(self) -> None:
        """Somebody looks at the endpoint with a browser."""
        text = f"specscope receives OTLP traces here: POST {PATH}\n"
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", text.encode())

    def _length(self, limit: int) -> int:
        """The body's length. One that is too long is read and dropped, so that the client gets the answer."""
        self._patience.allow(BODY_SECONDS, SILENT_SECONDS)
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if len(length) > 15 or int(length) > limit:
            self._discard(min(int(length[-15:]), 4 * limit))
            raise _too_large(limit)
        return int(length)

    def _read(self, receiver: Receiver) -> tuple[str, list[Received]]:
        """(content type, spans) of the request. Its body is read first, so that the client gets the answer."""
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the body ends after {len(body)} of {length} bytes")
        if self.path.split("?")[0].rstrip("/") != PATH:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is nothing at this path; traces go to {PATH}")
        kind = self.headers.get("Content-Type", "").split(";")[0].strip().lower()
        if kind not in (PROTOBUF, JSON):
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {PROTOBUF} or {JSON}")
        try:
            return kind, receiver.parse(body, kind, self.headers.get("Content-Encoding", "identity").strip().lower())
        except ValueError as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None

    def _discard(self, length: int) -> None:
        while length > 0 and (chunk := self.rfile.read(min(length, 65536))):
            length -= len(chunk)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        if status != HTTPStatus.OK:  # what follows on this connection may be the rest of a bad request
            self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: a screen may be on this terminal."""


def _too_large(limit: int) -> _RefusedError:
    return _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {limit} bytes")


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    try:
        if encoding == "gzip":
            body = gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
        elif encoding == "deflate":
            body = zlib.decompressobj().decompress(body, limit + 1)
        elif encoding != "identity":
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the body as it is, or with gzip or deflate")
    except (OSError, EOFError, zlib.error):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the body is not valid {encoding}") from None
    if len(body) > limit:
        raise _too_large(limit)
    return body
