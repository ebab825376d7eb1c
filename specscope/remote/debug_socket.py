"""The debugger's socket, of our server or inside another engine: JSON lines, one client at a time, this user's alone.

A client sends {"line": TEXT} for each command and {"interrupt": true} to end the wait of one. It gets a greeting and an
answer to each line: {"text", "refused", "quitting"}. AttachedCommands is ours: the same commands as everywhere.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from msgspec import Struct

from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.wire.codec import plain_error

log = logging.getLogger("specscope.debug")
LONGEST = 2**16  # bytes of a line
PAUSE = 0.2  # seconds after a client that could not be let in
LEAVES = 1.0  # seconds in which the client before may take its leave
BUSY = "another debugger is attached; it must quit first"


class DebugMessage(Struct):
    line: str = ""
    interrupt: bool = False


class ClientGate(Protocol):
    """Through which one client moves an engine."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...  # held while a command runs
    def open(self) -> None: ...  # it has come
    def interrupt(self) -> None: ...  # it waits no longer
    def close(self) -> None: ...  # it has left


class DebugServer:
    """Listens from when it is made until it is closed. Its threads die with the process."""

    def __init__(
        self, path: Path, gate: ClientGate, greeting: Callable[[], str], commands: Callable[[], Commands]
    ) -> None:
        """`commands`: makes a client's. Raises OSError."""
        self._path, self._gate, self._greeting, self._commands = path, gate, greeting, commands
        self._free = threading.Lock()  # held while a client is there
        self._closed = threading.Event()
        self._socket = _listen(path)
        threading.Thread(target=self._accept, name="specscope-debug", daemon=True).start()

    def close(self) -> None:
        """Accept no more clients; the current one sees the end of the process."""
        self._closed.set()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:  # it is closed, or there is no room for a client just now
                self._closed.wait(PAUSE)
                continue
            if self._free.acquire(timeout=LEAVES):
                threading.Thread(target=self._serve, args=(client,), name="specscope-client", daemon=True).start()
            else:
                with suppress(OSError):
                    _send(client, text=BUSY, refused=True)
                client.close()

    def _serve(self, client: socket.socket) -> None:
        """Serve one client until it leaves: however it leaves, the engine goes on."""
        gate, lines = self._gate, SimpleQueue[DebugMessage | UserError | None]()
        gate.open()
        reader = threading.Thread(target=self._read, args=(client, lines), name="specscope-reader", daemon=True)
        reader.start()
        try:
            with gate.lock:
                commands = self._commands()
            _send(client, text=self._greeting(), refused=False)
            while not commands.quitting and (message := lines.get()) is not None:
                with gate.lock:
                    answer = _run(commands, message)
                _send(client, **answer, quitting=commands.quitting)
        except OSError:
            pass  # it is gone
        except Exception as error:
            log.warning("specscope: the debugger ends: %r", error, exc_info=True)
        finally:
            gate.close()
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            reader.join()  # later it would close the gate for the next client
            client.close()
            self._free.release()

    def _read(self, client: socket.socket, lines: SimpleQueue[DebugMessage | UserError | None]) -> None:
        """Read the client's messages, also while a command runs: it may press Ctrl-C, or disconnect."""
        try:
            with client.makefile("rb") as stream:
                while raw := stream.readline(LONGEST):
                    message = _message(raw)
                    if isinstance(message, DebugMessage) and message.interrupt:
                        self._gate.interrupt()
                    else:
                        lines.put(message)
        except OSError:
            pass
        finally:
            self._gate.close()
            lines.put(None)


def _message(raw: bytes) -> DebugMessage | UserError:
    if len(raw) == LONGEST and not raw.endswith(b"\n"):
        return UserError(f"a line may have at most {LONGEST:,} bytes")
    try:
        return decoded(raw, DebugMessage)
    except ValueError as error:
        return UserError(f'a line must be JSON, such as {{"line": "step"}}: {plain_error(error)}')


def _run(commands: Commands, message: DebugMessage | UserError) -> dict[str, Any]:
    try:
        if isinstance(message, UserError):
            raise message
        return {"text": commands.run(message.line), "refused": False}
    except UserError as error:
        return {"text": str(error), "refused": True}
    except Exception as error:
        log.warning("specscope: the debugger failed at %r", message, exc_info=True)
        return {"text": f"the debugger failed: {type(error).__name__}: {error}", "refused": True}


def _send(client: socket.socket, **message: object) -> None:
    client.sendall(json.dumps(message).encode() + b"\n")


def check_socket(path: str, flag: str) -> None:
    """Refuse a socket that no debugger could open, before a model is loaded. Raises UserError."""
    try:
        _listen(Path(path)).close()
        os.unlink(path)
    except OSError as error:
        raise UserError(f"{flag} {path}: {(error.strerror or str(error)).lower()}") from None


def _listen(path: Path) -> socket.socket:
    """A socket that only this user can open. One that an earlier process left behind is removed."""
    made = socket.socket(socket.AF_UNIX)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(f"another process listens on {path}")
        path.unlink()
    elif path.exists():
        raise OSError("it exists and is not a socket: give another name")
    made.bind(str(path))
    os.chmod(path, 0o600)  # before anybody can connect: it does not listen yet
    made.listen(4)
    return made


LOOK_SECONDS = 0.1  # between two looks whether Ctrl-C was pressed
GREETING_SECONDS = 10.0
LARGEST = 2**24  # bytes of an answer
GONE = "the engine or its debugger has ended"


class AttachedCommands(Commands):
    """Sends each line to vLLM and returns its answer. Raises UserError for what vLLM refuses."""

    def __init__(self, path: str) -> None:
        """Connect to the socket at `path`. Raises UserError."""
        super().__init__(Session())
        self._socket = _connect(path)
        self._answers = self._socket.makefile("rb")
        self._socket.settimeout(GREETING_SECONDS)
        greeting = self._receive()
        if greeting.get("refused"):
            raise UserError(str(greeting["text"]))
        self._socket.settimeout(None)
        self.greeting = str(greeting["text"])

    def run(self, line: str) -> str:
        """What vLLM's debugger prints. It waits as long as the command does; Ctrl-C ends the wait."""
        answer = self._ask({"line": " ".join(line.splitlines())})
        self.quitting = bool(answer.get("quitting"))
        return str(answer["text"])

    def _ask(self, message: object) -> dict[str, object]:
        """Send a message and wait for the answer, however long that takes. Raises UserError for a refusal."""
        self._send(message)
        interrupted = False
        while not select.select([self._socket], [], [], LOOK_SECONDS)[0]:
            if self.session.interrupted() and not interrupted:
                interrupted = True
                self._send({"interrupt": True})
        answer = self._receive()
        if answer.get("refused"):
            raise UserError(str(answer["text"]))
        return answer

    def close(self) -> None:
        """Leave: vLLM goes on, and its breakpoints are gone."""
        self._answers.close()
        self._socket.close()

    def _send(self, message: object) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._end()

    def _receive(self) -> dict[str, object]:
        line = b""
        with suppress(OSError):
            line = self._answers.readline(LARGEST)
        if not line.endswith(b"\n"):
            self._end()
        try:
            answer: dict[str, object] = decoded(line)
            return {"text": str(answer.pop("text")), **answer}
        except (ValueError, KeyError, TypeError, AttributeError):
            self.quitting = True
            raise UserError("no vLLM debugger listens there") from None

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
        raise UserError(f"cannot attach to {path}: {why}. serve --debug-socket and vllm --debug open one") from None
    return made
