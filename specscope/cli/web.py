"""`specscope tui --web`: the screen in a browser, through textual-serve, for the user alone.

Whoever reaches a session can type debugger commands. A page of another site must not: its websocket says so in its
Origin, and a name that was rebound to this machine's address (DNS rebinding) says so in its Host. On an address that
other machines reach, every name may be right, so a token decides: it is in the URL that is printed at the start.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specscope
from specscope.errors import UserError

if TYPE_CHECKING:
    from aiohttp.web import Request, StreamResponse

REMEDY = "pip install 'specscope[web]'"
SESSIONS = 8  # open at once; each is a process, and most have an engine
LOCAL = ("localhost", "127.0.0.1", "::1")
Handler = Callable[["Request"], Awaitable["StreamResponse"]]


class Guard:
    """Decides whose requests are answered."""

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self.cookie = f"specscope-{port}"  # cookies are shared by the ports of a host
        names = {name for name in (*LOCAL, host) if name}
        self.hosts = {address(name, port) for name in names}
        if port == 80:  # which browsers leave out
            self.hosts |= {bracketed(name) for name in names}

    def refusal(self, request: Request) -> str:
        """Why a request is not answered; empty where it is."""
        host = request.headers.get("Host", "").lower()
        origins = request.headers.getall("Origin", [])
        if not self.token and host not in self.hosts:
            return f"this server is {address('localhost', self.port)}, not {host[:100]!r}"
        if any(origin.lower() != f"http://{host}" for origin in origins):
            return "pages of other sites may not use this server"
        if self.token and not self._knows(request):
            return "open the URL that specscope printed when it started: it contains a token"
        return ""

    def _knows(self, request: Request) -> bool:
        given = (request.query.get("token", ""), request.cookies.get(self.cookie, ""))
        return any(hmac.compare_digest(text.encode(), self.token.encode()) for text in given)


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches this address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def bracketed(host: str) -> str:
    """The host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host.lower()


def address(host: str, port: int) -> str:
    """HOST:PORT as it stands in a URL."""
    return f"{bracketed(host)}:{port}"


def make_server(command: Sequence[str], host: str, port: int) -> tuple[Any, Guard]:
    """textual-serve's server with a guard before every route, and the guard. Raises UserError."""
    try:
        from aiohttp import web
        from textual_serve.server import Server
    except ImportError:
        raise UserError(f"--web needs textual-serve: {REMEDY}") from None
    guard = Guard(host, port)

    @web.middleware
    async def check(request: Request, handler: Handler) -> StreamResponse:
        why = guard.refusal(request)
        if why:
            return web.Response(status=403, text=f"specscope: {why}\n")
        if request.query.get("token") and guard.token:  # it moves to a cookie, out of the history and of what is shared
            answer = web.HTTPFound(request.rel_url.without_query_params("token"))
            answer.set_cookie(guard.cookie, guard.token, httponly=True, samesite="Strict")
            return answer
        response = await handler(request)
        if not response.prepared:  # in another site's frame the user could be made to click and type here
            response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
        return response

    class Guarded(Server):
        """The server, with a limit on sessions, that uses the host name its visitor used."""

        sessions = 0

        async def _make_app(self) -> web.Application:
            app: web.Application = await super()._make_app()
            app.middlewares.append(check)
            return app

        async def handle_index(self, request: Request) -> Any:  # noqa: ANN401
            self.public_url = f"http://{request.host}"
            return await super().handle_index(request)

        async def handle_websocket(self, request: Request) -> web.WebSocketResponse:
            if self.sessions >= SESSIONS:
                raise web.HTTPServiceUnavailable(text=f"specscope: {SESSIONS} sessions are open: close one\n")
            self.sessions += 1
            try:
                return await super().handle_websocket(request)
            finally:
                self.sessions -= 1

    # -P: no file in the current folder may shadow a package.
    line = shlex.join([sys.executable, "-P", "-m", "specscope", *command])
    templates = Path(specscope.__file__).parent / "tui" / "web"  # textual-serve's own page asks another host for a font
    url = f"http://{address(host, port)}" + (f"/?token={guard.token}" if guard.token else "")
    return Guarded(line, host=host, port=port, title="specscope", public_url=url, templates_path=templates), guard


def serve(command: Sequence[str], host: str, port: int) -> None:
    """Serve `specscope COMMAND` until Ctrl-C; each page that is opened runs its own. Raises UserError."""
    if not host:
        raise UserError("--web-host is empty: use 127.0.0.1 for this machine only, 0.0.0.0 for every address")
    server, _ = make_server(command, host, port)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "there is no such host"
        raise UserError(f"cannot listen on {address(host, port)}: {reason}") from error
    server.serve()
