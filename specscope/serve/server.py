"""Runs the server: from a loaded engine to its graceful end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from specscope.errors import UserError, first_line
from specscope.interrupt import may_end
from specscope.remote import http
from specscope.remote.http import HttpServer
from specscope.serve.calls import Router
from specscope.serve.engine_thread import EngineThread
from specscope.serve.errors import ApiError, stopping
from specscope.serve.http import make_app
from specscope.serve.service import Observed, ServeOptions, Service
from specscope.trace.checked import is_loopback
from specscope.trace.record.records import StepRecord

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

ENGINE_SECONDS = 5.0  # for the engine to end its requests


def bind(options: ServeOptions) -> socket.socket:
    """A socket at the address. Raises UserError, also where other machines could reach it and there is no key."""
    if options.api_key is None and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host} lets other machines connect: give --api-key-file FILE or set SPECSCOPE_API_KEY, "
            "or use 127.0.0.1"
        )
    try:
        return http.bind(options.host, options.port)
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise UserError(f"cannot serve on {options.host}:{options.port}: {why}: check --host and --port") from None


class Serving:
    """One server, from its start to its end."""

    def __init__(self, engine: Engine, options: ServeOptions, bound: socket.socket) -> None:
        self.engine, self.options, self._socket = engine, options, bound
        self._asked, self._at_once = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None
        self.service: Service | None = None  # while it serves
        self.server: HttpServer | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until a signal. `ready`: called when clients can connect. Raises the error that ended the engine."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in may_end():
                loop.add_signal_handler(number, self.stop, number)
        run = self.engine.run_info
        router, observed = Router(), Observed(self.options.name or run.target, run, self.options.ratio)
        self.engine.bus.subscribe(observed)

        def on_step(record: StepRecord) -> None:
            loop.call_soon_threadsafe(router.take, record)

        def ended(error: Exception | None) -> None:
            loop.call_soon_threadsafe(self._ended, error)

        thread = EngineThread(self.engine, on_step, ended)
        service = self.service = Service(self.engine, thread, router, observed, self.options)
        closers = self._debug(thread)
        thread.start()
        try:
            await self._serve(service, ready)
        finally:
            for close in closers:
                close()
            await loop.run_in_executor(None, thread.stop, ENGINE_SECONDS)
            service.close()
            observed.close()
        if self._error is not None:
            raise self._error

    def _debug(self, thread: EngineThread) -> list[Callable[[], None]]:
        """Listen for debuggers, where that was requested; returns what closes it. Raises UserError."""
        path = self.options.debug_socket
        if path is None:
            return []
        from specscope.serve.debugger import listen

        try:
            debugger, listening = listen(path, thread, self.options.privacy)
        except OSError as error:
            raise UserError(f"--debug-socket {path}: {(error.strerror or str(error)).lower()}") from None
        thread.also.append(debugger.told)
        return [listening.close, debugger.close]

    async def _serve(self, service: Service, ready: Callable[[], None]) -> None:
        server = self.server = HttpServer(make_app(service), self._socket)
        await server.start()
        ready()
        await self._asked.wait()
        service.draining = True
        server.stop_listening()
        await self._drain(service)
        await server.close()

    async def _drain(self, service: Service) -> None:
        """Let requests finish; those that do not in time get an error that says so."""
        finished = asyncio.ensure_future(service.router.empty.wait())
        at_once = asyncio.ensure_future(self._at_once.wait())
        seconds = 0 if self._error else self.options.shutdown_seconds
        await asyncio.wait({finished, at_once}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        error = stopping() if self._error is None else ApiError(500, f"the engine failed: {first_line(self._error)}")
        service.router.fail_all(error)
        with suppress(TimeoutError):
            await asyncio.wait_for(finished, 0 if self._error else self.options.limits.end_seconds)

    def stop(self, number: int = signal.SIGINT) -> None:
        """On the first signal let requests finish, on the second do not wait for them. On the event loop."""
        (self._at_once if self._asked.is_set() else self._asked).set()

    def _ended(self, error: Exception | None) -> None:
        """The engine's thread has ended: after a failure nothing can be served."""
        self._error = self._error or error
        self._asked.set()
