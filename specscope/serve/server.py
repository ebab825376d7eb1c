"""Runs the server: from a loaded engine to its graceful end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from specscope.errors import UserError, first_line
from specscope.interrupt import may_end
from specscope.serve.calls import Router
from specscope.serve.engine_thread import EngineThread
from specscope.serve.errors import ApiError, stopping
from specscope.serve.http import make_app
from specscope.serve.observed import Observed
from specscope.serve.protocol import BoundedProtocol
from specscope.serve.service import ServeOptions, Service
from specscope.trace.records import StepRecord

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

HAND_BACK_SECONDS = 2.0  # for clients to take what they are told last
ENGINE_SECONDS = 5.0  # for the engine to end its requests


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(options: ServeOptions) -> socket.socket:
    """A socket at the address. Raises UserError, also where others would reach it and there is no key."""
    if options.api_key is None and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host} lets other machines connect: give --api-key KEY or set SPECSCOPE_API_KEY, "
            "or use 127.0.0.1"
        )
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"cannot serve on {options.host}:{options.port}: {why}: check --host and --port") from None
    return made


class _Server(uvicorn.Server):
    """Uvicorn's, which leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours are handled below."""
        yield


class Serving:
    """One server, from its start to its end."""

    def __init__(self, engine: Engine, options: ServeOptions, bound: socket.socket) -> None:
        self.engine, self.options, self._socket = engine, options, bound
        self._asked, self._at_once = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None
        self.service: Service | None = None  # while it serves
        self.server: uvicorn.Server | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until a signal. `ready`: called when clients can come. Raises what ended the engine."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in may_end():
                loop.add_signal_handler(number, self.stop, number)
        router, observed = Router(), Observed(self.options.name or self.engine.run_info.target)
        self.engine.bus.subscribe(observed)

        def told(record: StepRecord) -> None:
            loop.call_soon_threadsafe(router.take, record)

        def ended(error: Exception | None) -> None:
            loop.call_soon_threadsafe(self._ended, error)

        thread = EngineThread(self.engine, told, ended)
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
        """Listen for debuggers, where that was asked for; what closes it. Raises UserError."""
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
        protocol: Any = partial(BoundedProtocol, limits=self.options.limits)
        config = uvicorn.Config(
            make_app(service), http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=int(HAND_BACK_SECONDS), backlog=256,
        )  # fmt: skip
        server = self.server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready()
        await self._asked.wait()
        service.draining = True
        for listener in server.servers:
            listener.close()
        await self._drain(service)
        server.should_exit = True
        await serving

    async def _drain(self, service: Service) -> None:
        """Let requests finish; those that do not in time are handed back with an error that says so."""
        finished = asyncio.ensure_future(service.router.empty.wait())
        at_once = asyncio.ensure_future(self._at_once.wait())
        seconds = 0 if self._error else self.options.shutdown_seconds
        await asyncio.wait({finished, at_once}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        error = stopping() if self._error is None else ApiError(500, f"the engine failed: {first_line(self._error)}")
        service.router.fail_all(error)
        with suppress(TimeoutError):
            await asyncio.wait_for(finished, 0 if self._error else HAND_BACK_SECONDS)

    def stop(self, number: int = signal.SIGINT) -> None:
        """A signal: let requests finish; a second one: do not. On the event loop."""
        (self._at_once if self._asked.is_set() else self._asked).set()

    def _ended(self, error: Exception | None) -> None:
        """The engine's thread has ended: after a failure nothing can be served."""
        self._error = self._error or error
        self._asked.set()
