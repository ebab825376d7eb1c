"""The client of debug_server.py: the same commands as everywhere, run where the engine runs."""

from __future__ import annotations

import json
import os
import select
import socket

from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.trace.checked import decoded

LOOK_SECONDS = 0.1  # between two looks whether Ctrl-C was pressed
GREETING_SECONDS = 10.0
LARGEST = 2**24  # bytes of an answer
GONE = "vLLM has ended, or its debugger did"


class AttachedCommands(Commands):
    """Sends each line to vLLM and returns its answer. Raises UserError for what vLLM refuses."""

    def __init__(self, path: str) -> None:
        """Connect to the socket at `path`. Raises UserError."""
        super().__init__(Session())
        self._reading, self._buffer = False, b""
        self._socket = _connect(path)
        self._socket.settimeout(GREETING_SECONDS)
        greeting = self._receive()
        if greeting.get("refused"):
            raise UserError(str(greeting["text"]))
        self._socket.settimeout(None)
        self.greeting = str(greeting["text"])

    @property
    def reading(self) -> bool:
        """Whether the next lines are commands of a breakpoint, up to `end`."""
        return self._reading

    def run(self, line: str) -> str:
        """What vLLM's debugger prints. It waits as long as the command does; Ctrl-C ends the wait."""
        answer = self._ask({"line": " ".join(line.splitlines())})
        self._reading, self.quitting = bool(answer.get("reading")), bool(answer.get("quitting"))
        return str(answer["text"])

    def _ask(self, message: object) -> dict[str, object]:
        """Send a message and wait for the answer, however long that takes. Raises UserError for a refusal."""
        self._send(message)
        interrupted = False
        while b"\n" not in self._buffer:
            if select.select([self._socket], [], [], LOOK_SECONDS)[0]:
                self._read()
            elif self.session.interrupted() and not interrupted:
                interrupted = True
                self._send({"interrupt": True})
        answer = self._receive()
        if answer.get("refused"):
            raise UserError(str(answer["text"]))
        return answer

    def close(self) -> None:
        """Leave: vLLM goes on, and its breakpoints are gone."""
        self._socket.close()

    def _send(self, message: object) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._end()

    def _receive(self) -> dict[str, object]:
        while b"\n" not in self._buffer:
            self._read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer: dict[str, object] = decoded(line)
            return {"text": str(answer.pop("text")), **answer}
        except (ValueError, KeyError, TypeError, AttributeError):
            self.quitting = True
            raise UserError("what listens there is not vLLM's debugger") from None

    def _read(self) -> None:
        try:
            read = self._socket.recv(2**16)
        except OSError:
            read = b""
        if not read or len(self._buffer) > LARGEST:
            self._end()
        self._buffer += read

    def _end(self) -> None:
        self.quitting = True
        raise UserError(GONE)


def _connect(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(path)
    except OSError as error:
        made.close()
        why = "there is no such socket" if not os.path.exists(path) else (error.strerror or str(error)).lower()
        raise UserError(f"cannot attach to {path}: {why}. vLLM opens it with specscope vllm --debug") from None
    return made
