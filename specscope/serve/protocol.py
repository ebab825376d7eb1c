"""One connection: uvicorn's protocol, with the deadlines that it lacks. No client holds anything for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from specscope.serve.errors import JSON, ApiError
from specscope.serve.reading import Limits


class BoundedProtocol(H11Protocol):
    """Headers must arrive in time, and a reader must take what waits for it; else the connection is closed."""

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self._limits = limits
        self._headers_due: asyncio.TimerHandle | None = None
        self._reader_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Something of a request, or several."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # the headers are not whole yet
            self._expect_headers()
        elif self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _expect_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(self._limits.header_seconds, self._headers_late)

    def _headers_late(self) -> None:
        self._headers_due = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"the headers did not arrive within {self._limits.header_seconds:g} s"))

    def pause_writing(self) -> None:
        """What was sent waits for the reader."""
        super().pause_writing()
        if self._reader_due is None:
            self._reader_due = self.loop.call_later(self._limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The reader has taken some of it."""
        super().resume_writing()
        self._reader_is_well()

    def _reader_is_well(self) -> None:
        if self._reader_due is not None:
            self._reader_due.cancel()
            self._reader_due = None

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more was asked: the connection closes, and is not left open by a reader that takes nothing."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._limits.send_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self._headers_due is not None:
            self._headers_due.cancel()
        self._reader_is_well()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        body = msgspec.json.encode(error.body)
        head = [("content-type", JSON), ("content-length", str(len(body))), ("connection", "close")]
        try:
            for event in (
                h11.Response(status_code=error.status, headers=head), h11.Data(data=body), h11.EndOfMessage()
            ):  # fmt: skip
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer has begun
            pass
        self.transport.close()
