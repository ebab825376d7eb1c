"""The HTTP server under `serve` and under the OTLP port: it listens, guards, and holds clients to their limits.

uvicorn, with the bounds that it lacks: on connections, on the time for headers, bodies and readers, and on the bytes
of all bodies under way. The application decides what a refusal looks like.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specscope.trace.checked import is_loopback

CLOSE = {"connection": "close"}  # what is still on its way is not read
CLOSING = (b"connection", b"close")
DISCARDED = 64 * 2**20  # bytes of a refused body that are read


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 4 * 2**20
    bodies: int = 16  # how many bodies of the largest size may be under way in all
    connections: int = 1024
    header_seconds: float = 10.0  # from a request's first byte, or the connection, to the end of its headers
    body_seconds: float = 30.0  # from there to the end of the body
    silent_seconds: float = 10.0  # without a byte of the body
    send_seconds: float = 30.0  # in which a reader takes something of what waits for it
    idle_seconds: int = 5  # until the next request of a connection
    end_seconds: int = 1  # for clients to read the last answers


class Refusal(Exception):  # noqa: N818 - an answer, as starlette's HTTPException is one
    """A request that is answered with an error: its status, and one line that says why."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


@dataclass
class Application:
    app: ASGIApp
    host: str  # the address that is listened on
    refuse: Callable[[Refusal], Response]  # the answer; it may count
    limits: Limits = field(default_factory=Limits)


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, which does not listen yet. Raises OSError, and UnicodeError for a host that is none."""
    family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family, kind, number)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
    except BaseException:
        made.close()
        raise
    return made


class Bodies:
    """Receives bodies of some content types: each within a size and a time, and all of them within a size.

    A page of another site may send forms and text without asking; of any other kind its browser asks first.
    """

    def __init__(self, limits: Limits, *kinds: str) -> None:
        self._limits, self._kinds = limits, kinds
        self._left = limits.bodies * limits.body_bytes

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytearray]:
        """A whole body, whose space is freed after this block. Raises Refusal."""
        if media_type(request.headers) not in self._kinds:
            raise Refusal(415, f"the content type must be {' or '.join(self._kinds)}")
        body = bytearray()
        try:
            await self._read(request, body)
            yield body
        finally:
            self._left += len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        limit, clock = self._limits.body_bytes, asyncio.get_running_loop().time
        stated = request.headers.get("content-length", "")
        if stated.isdigit() and int(stated) > limit:
            raise too_large(limit)
        end = clock() + self._limits.body_seconds
        try:
            async with asyncio.timeout(0) as patience:
                patience.reschedule(min(end, clock() + self._limits.silent_seconds))
                async for piece in request.stream():
                    if len(body) + len(piece) > limit:
                        raise too_large(limit)
                    if len(piece) > self._left:
                        raise Refusal(503, "the server is receiving too much: try again later", {"retry-after": "1"})
                    body += piece
                    self._left -= len(piece)
                    patience.reschedule(min(end, clock() + self._limits.silent_seconds))
        except TimeoutError:
            raise Refusal(408, "the body did not arrive in time", CLOSE) from None


def too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body is larger than {limit} bytes, the limit")


class _Door:
    """Middleware before the application that turns away other sites.

    The rest of a refused body is read first, within bounds: a client that is still sending would not hear the answer.
    """

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, begun = Headers(scope=scope), False
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

        async def hear() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def tell(message: Message) -> None:
            nonlocal begun
            if unread and not begun:
                if "expect" not in headers and CLOSING not in message["headers"]:
                    await self._discard(hear)
                if unread:
                    message["headers"] = [*message["headers"], CLOSING]
            begun = True
            await send(message)

        why = another_site(self._application.host, headers.get("host", ""), headers.getlist("origin"))
        app = self._application.refuse(Refusal(403, why)) if why else self._application.app
        await app(scope, hear, tell)

    async def _discard(self, hear: Receive) -> None:
        limits, left = self._application.limits, DISCARDED
        with suppress(TimeoutError):
            async with asyncio.timeout(min(limits.silent_seconds, limits.body_seconds)):
                while left > 0 and (message := await hear()).get("more_body"):
                    left -= len(message["body"])


def media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


class _Connection(H11Protocol):
    """One connection. Headers must arrive in time, and a reader must take what waits for it; else it is closed."""

    def __init__(self, *args: Any, application: Application, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self._application, self._limits = application, application.limits
        self._due: dict[str, asyncio.TimerHandle] = {}  # what ends it, by what is waited for

    def _expect(self, what: str, seconds: float, end: Callable[[], None]) -> None:
        if what not in self._due:
            self._due[what] = self.loop.call_later(seconds, end)

    def _has_come(self, what: str) -> None:
        if what in self._due:
            self._due.pop(what).cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(Refusal(503, "too many connections are open: try again later", {"retry-after": "1"}))
        else:
            self._expect("headers", self._limits.header_seconds, self._headers_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # the headers are not whole yet
            self._expect("headers", self._limits.header_seconds, self._headers_late)
        else:
            self._has_come("headers")

    def _headers_late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(Refusal(408, f"the headers did not arrive within {self._limits.header_seconds:g} s"))

    def pause_writing(self) -> None:  # the reader is behind: output waits
        super().pause_writing()
        self._expect("reader", self._limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_come("reader")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._limits.send_seconds, self.transport.abort)  # even where the reader takes nothing

    def connection_lost(self, exc: Exception | None) -> None:
        for what in list(self._due):
            self._has_come(what)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # to what is not HTTP
        self._refuse(Refusal(400, msg))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without the application, and close."""
        answer = self._application.refuse(refusal)
        head = [*answer.raw_headers, CLOSING]
        with suppress(h11.LocalProtocolError):  # an answer has begun
            for event in (
                h11.Response(status_code=answer.status_code, headers=head), h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):  # fmt: skip
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer:
    """Serves on a bound socket, from `start` to `close`, both on one event loop."""

    def __init__(self, application: Application, bound: socket.socket) -> None:
        # Of the files that a process may have open, half are for connections: one that is refused has one too, until
        # it is closed. asyncio accepts as many as the backlog in each of three turns before it counts them.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = min(application.limits.connections, files // 2)
        application = replace(application, limits=replace(application.limits, connections=most))
        protocol: Any = partial(_Connection, application=application)
        self._socket = bound
        self._server = uvicorn.Server(
            uvicorn.Config(
                _Door(application), http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
                interface="asgi3", server_header=False, timeout_keep_alive=application.limits.idle_seconds,
                timeout_graceful_shutdown=application.limits.end_seconds, backlog=min(256, files // 16),
            )
        )  # fmt: skip
        self._serving: asyncio.Future[None] | None = None

    @property
    def connections(self) -> set[Any]:
        return self._server.server_state.connections

    async def start(self) -> None:
        """Start serving: clients can connect once this returns."""
        serving = self._serving = asyncio.ensure_future(self._server._serve(sockets=[self._socket]))  # signals are ours
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)

    def stop_listening(self) -> None:
        for listener in self._server.servers:
            listener.close()

    async def close(self) -> None:
        """Let answers that have begun finish, for a short while."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


# A page that a browser has open can send requests here. Its Origin says whose it is, and a name that was rebound to
# this machine's address (DNS rebinding) stands in its Host. Where other machines reach the address, a key or a token
# decides. The port in Host may be another one: of a tunnel, or of a container.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]{1,5})?")


def another_site(listens: str, host: str, origins: Iterable[str]) -> str:
    """Why a request with these headers is refused at an address; empty where it is not."""
    host = host.lower()
    name = _HOST.fullmatch(host)
    if is_loopback(listens) and not (name and is_loopback(name[1] or name[2])):
        return f"this server is {bracketed(listens)}, not {host[:100]!r}: only this machine may use it, by that name"
    if any(origin.lower() != f"http://{host}" for origin in origins):
        return "pages of other sites may not call this server"
    return ""


def bracketed(host: str) -> str:
    """The host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host.lower()


def address(host: str, port: int) -> str:
    """HOST:PORT as it stands in a URL."""
    return f"{bracketed(host)}:{port}"
