"""Fetching a page over HTTP with a limit on the total time.

urllib's timeout is for each read: a server that sends a byte now and then, in its headers or in its page, would be
waited for without end. Here a timer shuts the connection down.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener


class _Handler(HTTPSHandler, HTTPHandler):
    """Opens connections, those of redirects too, and shuts them once the time is over."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self._sockets: list[socket.socket] = []

    def http_open(self, req: Request) -> HTTPResponse:
        """As urllib calls it."""
        return self.do_open(self._made(HTTPConnection), req)

    def https_open(self, req: Request) -> HTTPResponse:
        """As urllib calls it."""
        return self.do_open(self._made(HTTPSConnection), req)

    def _made(self, kind: type[HTTPConnection]) -> Callable[..., HTTPConnection]:
        def make(host: str, **options: Any) -> HTTPConnection:  # noqa: ANN401
            made = kind(host, **options)
            connect = made.connect

            def known() -> None:
                connect()
                self._sockets.append(made.sock)
                if self.is_late:
                    self.end()

            made.connect = known  # type: ignore[method-assign]
            return made

        return make

    def end(self) -> None:
        """Shut down all connections, which ends any read."""
        self.is_late = True
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def fetched(request: Request, silent: float, whole: float, limit: int) -> bytes:
    """The page, or its first `most` bytes. Raises what urllib raises, and TimeoutError where it takes too long."""
    handler, page = _Handler(), b""
    timer = threading.Timer(whole, handler.end)
    timer.daemon = True
    timer.start()
    try:
        with build_opener(handler).open(request, timeout=silent) as answer:
            page = answer.read(limit)
    except (OSError, HTTPException):
        if not handler.is_late:
            raise
    finally:
        timer.cancel()
    if handler.is_late:  # what was read is a part
        raise TimeoutError(f"its page did not come within {whole:g} s")
    return page
