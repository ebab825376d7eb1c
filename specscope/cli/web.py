"""`specscope tui --web`: the screen in a browser, through textual-serve, for this user only.

Whoever reaches a session can type debugger commands, so a page of another site must not (remote/guard.py). On an
address that other machines can reach, a token is required: it is in the URL that is printed at the start.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specscope
from specscope.cli.streams import say
from specscope.errors import UserError
from specscope.interrupt import handled_by
from specscope.remote.guard import address, another_site
from specscope.trace.checked import is_loopback

if TYPE_CHECKING:
    from aiohttp.web import Request, StreamResponse
    from textual_serve.app_service import AppService

REMEDY = "pip install 'specscope[web]'"
END_SECONDS = 30  # for a session's process to end: its engine ends the requests first
SESSIONS = 8  # open at once; each is a process, and most have an engine
Handler = Callable[["Request"], Awaitable["StreamResponse"]]


class Guard:
    """Decides which requests are answered."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self.cookie = f"specscope-{port}"  # cookies are shared by the ports of a host

    def refusal(self, request: Request) -> str:
        """Why a request is not answered; empty where it is."""
        headers = request.headers
        why = another_site(self._host, headers.get("Host", ""), headers.getall("Origin", []))
        if not why and self.token and not self._knows(request):
            return "open the URL that specscope printed when it started: it contains a token"
        return why

    def _knows(self, request: Request) -> bool:
        given = (request.query.get("token", ""), request.cookies.get(self.cookie, ""))
        return any(hmac.compare_digest(text.encode(), self.token.encode()) for text in given)


async def end_of(session: AppService) -> None:
    """Ask a session's process to end, and wait until it has; one that does not is killed."""
    await session.stop()
    process = session._process
    if process is None or process.stdin is None:
        return
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


async def until_either(hearing: asyncio.Task[None], session: asyncio.Task[None] | None) -> None:
    """Wait until the page is closed or its session has ended: a session that cannot start does not report it."""
    await asyncio.wait({hearing, *([] if session is None else [session])}, return_when=asyncio.FIRST_COMPLETED)
    if hearing.done():
        await hearing
    hearing.cancel()


def make_server(command: Sequence[str], host: str, port: int) -> tuple[Any, Guard]:
    """textual-serve's server with a guard before every route, and the guard. Raises UserError."""
    guard = Guard(host, port)
    try:
        server = _guarded_server(_check(guard))
    except ImportError:
        raise UserError(f"--web needs textual-serve: {REMEDY}") from None
    # -P: no file in the current folder may shadow a package.
    # exec: its parent is then this server and no shell, and the session ends when the server is gone (lifetime.py)
    line = "exec " + shlex.join([sys.executable, "-P", "-m", "specscope", *command])
    templates = Path(specscope.__file__).parent / "tui" / "web"  # textual-serve's own page loads a font from elsewhere
    url = f"http://{address(host, port)}" + (f"/?token={guard.token}" if guard.token else "")
    return server(line, host=host, port=port, title="specscope", public_url=url, templates_path=templates), guard


def _check(guard: Guard) -> Any:  # noqa: ANN401
    """A middleware that refuses what the guard does. Raises ImportError."""
    from aiohttp import web

    @web.middleware
    async def check(request: Request, handler: Handler) -> StreamResponse:
        why = guard.refusal(request)
        if why:
            return web.Response(status=403, text=f"specscope: {why}\n")
        if request.query.get("token") and guard.token:  # moved to a cookie, out of the history and of shared links
            answer = web.HTTPFound(request.rel_url.without_query_params("token"))
            answer.set_cookie(guard.cookie, guard.token, httponly=True, samesite="Strict")
            return answer
        response = await handler(request)
        if not response.prepared:  # in another site's frame the user could be made to click and type here
            response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
        return response

    return check


def _guarded_server(check: Any) -> Any:  # noqa: ANN401
    """textual-serve's Server as a class whose requests pass `check`. Raises ImportError."""
    from aiohttp import WSCloseCode, web
    from textual_serve.server import Server

    class Guarded(Server):
        """The server, with a limit on sessions, that uses the host name its visitor used.

        A session has ended when its process has: textual-serve waits for the last of its output only, and where the
        server's event loop is closed meanwhile, nobody waits for the process.
        """

        sessions = 0

        def __init__(self, line: str, **how: Any) -> None:  # noqa: ANN401
            super().__init__(line, **how)
            self.ends: dict[web.WebSocketResponse, asyncio.Event] = {}  # by page: set as its session has ended

        async def _make_app(self) -> web.Application:
            app: web.Application = await super()._make_app()
            app.middlewares.append(check)
            return app

        async def on_startup(self, app: web.Application) -> None:
            """Print no banner of textual-serve's: `serve` prints what is served, and where."""

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

        async def _process_messages(self, websocket: web.WebSocketResponse, app_service: AppService) -> None:
            self.ends[websocket] = ended = asyncio.Event()
            hearing = asyncio.create_task(super()._process_messages(websocket, app_service))
            try:
                await until_either(hearing, app_service._task)
            finally:
                try:
                    await end_of(app_service)
                finally:
                    del self.ends[websocket]
                    ended.set()

        async def on_shutdown(self, app: web.Application) -> None:
            await super().on_shutdown(app)
            ends = dict(self.ends)  # each page's own handler ends its session: ending it here too would clash
            await asyncio.gather(*(page.close(code=WSCloseCode.GOING_AWAY) for page in ends))
            await asyncio.gather(*(ended.wait() for ended in ends.values()))

    return Guarded


def serve(command: Sequence[str], host: str, port: int) -> None:
    """Serve `specscope COMMAND` until Ctrl-C or SIGTERM; each page that is opened runs its own. Raises UserError."""
    if not host:
        raise UserError("--web-host is empty: use 127.0.0.1 for this machine only, 0.0.0.0 for every address")
    server, _ = make_server(command, host, port)
    logging.getLogger("textual-serve").addHandler(logging.NullHandler())  # it logs errors that it also raises
    logging.getLogger("textual-serve").propagate = False
    asyncio.run(_serve(server, f"specscope: serving specscope {shlex.join(command)} on {server.public_url}"))


async def _serve(server: Any, what: str) -> None:  # noqa: ANN401
    """Serve until a signal; the sessions then end first. Raises UserError."""
    from aiohttp.web import AppRunner, TCPSite

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end(_: signal.Signals) -> None:
        loop.call_soon_threadsafe(stop.set)

    with handled_by(end):
        runner = AppRunner(await server._make_app(), access_log=None)
        await runner.setup()
        try:
            await TCPSite(runner, server.host, server.port).start()
            say(f"{what} (Ctrl-C to stop)")
            await stop.wait()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "there is no such host"
            raise UserError(f"cannot listen on {address(server.host, server.port)}: {reason}") from error
        finally:
            await runner.cleanup()
