"""Traces straight from their store, Jaeger or Tempo: a request's, and those of the engine steps that it links to.

Pages are fetched over HTTP, each within a time and a size; several at once, over connections that are used again. The
timeout of a socket is for each read: a server that sends a byte now and then, in its headers or in its page, would be
waited for without end. Here a timer shuts the connection down. Proxies are those that the environment names.
"""

from __future__ import annotations

import atexit
import base64
import socket
import string
import tempfile
import threading
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from specscope.errors import UserError, first_line
from specscope.trace.checked import decoded
from specscope.trace.history.wording import plural
from specscope.trace.kinds import LARGEST
from specscope.trace.stored import CaptureSource, StoreAddress

SILENT = 15.0  # seconds that a store may be silent: a trace that it has to look for takes some
WHOLE = 120.0  # seconds that a trace may take in all
AT_ONCE = 8  # requests under way
MOST_STEPS = 4096  # engine steps that are fetched
LARGEST_ALL = 512 * 2**20  # bytes of them in all
MOST_FAILURES = 5  # engine steps that fail otherwise than by being gone: no more are asked for
LINKING = ("prefill", "decode_step")  # spans whose links lead to engine steps
GONE = (404, 405, 501)  # no such trace, or no such API
LOGIN = (401, 403)
Fetched = tuple[bytes, list[dict[str, Any]]]  # an answer in lines, and its spans
Get = Callable[[str], Fetched]


def fetch_capture(
    address: StoreAddress, headers: Mapping[str, str], progress: Callable[[float], None] | None = None
) -> CaptureSource:
    """A trace and its engine steps, as far as the store has them, in a file that is deleted with the process.

    Raises UserError in one line. Engine steps that are no longer there are no error; others that are missing are noted.
    """
    client = HttpClient(SILENT, WHOLE)

    def get(api: str, trace: str) -> Fetched:
        url = f"{api}{trace}{address.query}"
        return _read(client.get(url, LARGEST + 1, {"Accept": "application/json", **headers}))

    try:
        api, lines, spans = _trace(get, address)
        number, name = tempfile.mkstemp(prefix="specscope-", suffix=".jsonl")  # for this user alone
        atexit.register(lambda: Path(name).unlink(missing_ok=True))
        with open(number, "wb") as file:
            file.write(lines)
            notes = _fetch_steps(lambda trace: get(api, trace), _linked(spans), file, progress, client.close)
    except OSError as error:
        raise UserError(f"{address}: cannot write what was fetched: {error.strerror}") from error
    finally:
        client.close()
    return CaptureSource(address, Path(name), first_run=True, place=address.place, notes=notes)


class _NoJsonError(ValueError):
    """What an answer is instead."""


def _trace(get: Callable[[str, str], Fetched], address: StoreAddress) -> tuple[str, bytes, list[dict[str, Any]]]:
    """The API that has the trace, its answer in lines, and the answer's spans. Raises UserError."""
    refusals: list[tuple[int, str]] = []  # how much each says, and its words
    for api in address.apis:
        try:
            lines, spans = get(api, address.trace)
        except StatusError as error:
            refusals.append(_refusal(error))
        except _NoJsonError as error:
            refusals.append((0, f"this is not a trace store: it answered {error}"))
        except UserError as error:
            raise UserError(f"{address}: {error}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise UserError(f"{address} cannot be reached: {first_line(error)}") from None
        else:
            if spans:
                return api, lines, spans
            refusals.append((1, "the store has no such trace (its response holds no spans)"))
    raise UserError(f"{address}: {max(refusals)[1]}")


def _refusal(error: StatusError) -> tuple[int, str]:
    if error.status in LOGIN:
        return 3, f"the store answered {error}: give a login with --header 'Name: value'"
    return (1, f"the store has no such trace ({error})") if error.status in GONE else (2, f"the store answered {error}")


def _fetch_steps(
    get: Get, traces: list[str], file: BinaryIO, progress: Callable[[float], None] | None, end: Callable[[], None]
) -> tuple[str, ...]:
    """Fetch engine steps into the file, several at once; a note of what is missing. `end`: ends what is under way.

    Raises OSError of the file.
    """
    asked, lock, room = traces[:MOST_STEPS], threading.Lock(), LARGEST_ALL
    failures: list[str] = []
    unasked = len(traces) - len(asked)

    def fetch(trace: str) -> None:
        nonlocal room, unasked
        if len(failures) >= MOST_FAILURES or room <= 0:
            with lock:
                unasked += 1
            return
        lines, failure = b"", ""
        try:
            lines, spans = get(trace)
            lines = lines if spans else b""
        except (StatusError, _NoJsonError) as error:
            is_gone = isinstance(error, StatusError) and error.status in GONE
            failure = "" if is_gone else f"the store answered {error}"
        except (OSError, HTTPException, ValueError, UserError) as error:
            failure = first_line(error)
        with lock:
            failures.extend([failure] if failure else [])
            room -= len(lines)
            file.write(lines)

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for done, future in enumerate(as_completed(pool.submit(fetch, trace) for trace in asked), 1):
            future.result()
            if progress:
                progress(done / len(asked))
    except BaseException:
        end()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    why = f": {failures[0]}" if failures else ", the limit"
    missing = f"{len(failures) + unasked} of {plural(len(traces), 'engine step')}"
    return (f"{missing} that the trace links to were not fetched{why}",) if failures or unasked else ()


def _read(page: bytes) -> Fetched:
    """An answer of one JSON document or one a line: as one a line, and its spans.

    Raises UserError for one that is too large, else _NoJsonError.
    """
    if len(page) > LARGEST:
        raise UserError(f"the trace is larger than {LARGEST >> 20} MiB, the limit")
    whole = page.replace(b"\r", b" ").replace(b"\n", b" ")  # no string in JSON has a line break
    for lines in ([whole], [line for line in page.splitlines() if line.strip()]):
        with suppress(ValueError):
            return b"\n".join([*lines, b""]), list(_spans([decoded(line) for line in lines]))
    is_page = page.lstrip()[:1] == b"<"
    raise _NoJsonError("with a web page: does it need a login (--header 'Name: value')?" if is_page else "without JSON")


def _spans(value: object) -> Iterator[dict[str, Any]]:
    """The spans in JSON, as OTLP or as Jaeger's own, however they are wrapped."""
    inner = [value]
    while inner:
        value = inner.pop()
        if isinstance(value, list):
            inner += value
        elif isinstance(value, dict):
            if ("spanId" in value or "spanID" in value) and _name(value):
                yield value
            else:
                inner += value.values()


def _name(span: Mapping[str, Any]) -> str:
    name = span.get("name") or span.get("operationName")
    return name if isinstance(name, str) else ""


def _linked(spans: list[dict[str, Any]]) -> list[str]:
    """The traces that a request's steps link to, as hex, each once."""
    traces: dict[str, None] = {}
    for span in spans:
        own = _hex(span.get("traceId") or span.get("traceID"))
        links = span.get("links") or span.get("references") if _name(span) in LINKING else None
        for link in links if isinstance(links, list) else ():
            trace = _hex(link.get("traceId") or link.get("traceID")) if isinstance(link, dict) else ""
            if trace and trace != own:
                traces[trace] = None
    return list(traces)


def _hex(trace: object) -> str:
    """A trace id that a store wrote, in hex or base64; "" for anything else."""
    if not isinstance(trace, str):
        return ""
    with suppress(ValueError):
        number = bytes.fromhex(trace) if len(trace) == 32 else base64.b64decode(trace, validate=True)
        return number.hex() if len(number) == 16 else ""
    return ""


PORTS = {"http": 80, "https": 443}
REDIRECTIONS = (301, 302, 303, 307, 308)
MOST_REDIRECTIONS = 5
CLOSED = "its client was closed"


class StatusError(OSError):
    """The server answered, and not with a page."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}".strip())
        self.status = status


class HttpClient:
    """Fetches pages, from several threads at once; keeps the connections that servers leave open."""

    def __init__(self, silent: float, whole: float) -> None:
        """`silent`: seconds that a server may be silent; `whole`: seconds that a page may take."""
        self._silent, self._whole = silent, whole
        self._idle: defaultdict[str, list[HTTPConnection]] = defaultdict(list)  # by where they lead
        self._under_way: set[_Deadline] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def get(self, url: str, limit: int, headers: Mapping[str, str]) -> bytes:
        """The page, or its first `limit` bytes. The URL's login is sent as one, unless the headers have another.

        Raises StatusError, other OSErrors, HTTPException and ValueError, and TimeoutError where it takes too long.
        """
        deadline = _Deadline(self._whole)
        with self._lock:
            if self._is_closed:
                raise OSError(CLOSED)
            self._under_way.add(deadline)
        try:
            deadline.timer.start()
            page = self._follow(url, limit, headers, deadline)
        except (OSError, HTTPException):
            if not deadline.is_over:
                raise
        finally:
            deadline.timer.cancel()
            with self._lock:
                self._under_way.discard(deadline)
        if deadline.is_over:  # what was read is a part
            late = TimeoutError(f"its page did not arrive within {self._whole:g} s")
            raise OSError(CLOSED) if self._is_closed else late
        return page

    def close(self) -> None:
        """End what is under way, with an error there, and close all connections."""
        with self._lock:
            self._is_closed = True
            for deadline in self._under_way:
                deadline.end()
            for connection in chain.from_iterable(self._idle.values()):
                connection.close()
            self._idle.clear()

    def _follow(self, url: str, limit: int, headers: Mapping[str, str], deadline: _Deadline) -> bytes:
        """The page where redirections lead to. Another server is told nothing that was meant for the first."""
        sent = {"User-Agent": "specscope"} | login_header(urlsplit(url)) | {n.title(): v for n, v in headers.items()}
        for _ in range(MOST_REDIRECTIONS + 1):
            answer, page = self._answer(urlsplit(url), limit, sent, deadline)
            target = answer.getheader("Location")
            if answer.status not in REDIRECTIONS or target is None:
                break
            before, url = url, urljoin(url, quote(target, safe=string.punctuation))
            places = ((each.scheme, each.hostname, each.port) for each in map(urlsplit, (before, url)))
            first, other = ((scheme, host, port or PORTS.get(scheme)) for scheme, host, port in places)
            by_tls = ("http", other[1], 80), ("https", other[1], 443)  # the same server, by TLS at its usual port
            if first != other and (first, other) != by_tls:
                sent = {name: sent[name] for name in ("User-Agent", "Accept") if name in sent}
        if not 200 <= answer.status < 300:
            raise StatusError(answer.status, answer.reason)
        return page

    def _answer(
        self, url: SplitResult, limit: int, headers: Mapping[str, str], deadline: _Deadline
    ) -> tuple[HTTPResponse, bytes]:
        if url.scheme not in PORTS or not url.hostname:
            raise OSError("it redirects to something that is not a page")
        proxy = _proxy_of(url)
        target = url._replace(scheme="", netloc="", fragment="", path=url.path or "/").geturl()
        if proxy is not None and url.scheme == "http":
            target = f"http://{url.netloc.rpartition('@')[2]}{target}"
            headers = {**headers, **login_header(proxy, "Proxy-Authorization")}
        key = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
        while True:
            with self._lock:
                connection = self._idle[key].pop() if self._idle[key] else None
            is_used, connection = connection is not None, connection or _connection(url, proxy, self._silent)
            try:
                if connection.sock is None:
                    connection.connect()
                deadline.watch(connection.sock)
                connection.request("GET", target, headers=dict(headers))
                answer = connection.getresponse()
                page = answer.read(limit)
                if answer.length and len(page) < limit:
                    raise IncompleteRead(page, answer.length)
            except BaseException as error:
                connection.close()
                closed = isinstance(error, (OSError, HTTPException)) and not isinstance(error, TimeoutError)
                if is_used and closed and not deadline.is_over:  # the server closed it meanwhile
                    continue
                raise
            if answer.isclosed() and not answer.will_close:
                with self._lock:
                    self._idle[key].append(connection)
            else:
                connection.close()
            return answer, page


class _Deadline:
    """Shuts a page's connection down once its time is over, which ends any read."""

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._socket: socket.socket | None = None
        self.timer = threading.Timer(seconds, self.end)
        self.timer.daemon = True

    def watch(self, connected: socket.socket) -> None:
        self._socket = connected
        if self.is_over:
            self.end()

    def end(self) -> None:
        self.is_over = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def login_header(url: SplitResult, name: str = "Authorization") -> dict[str, str]:
    """The header for the user and password of a URL; none where it has none."""
    login = ":".join(unquote(part or "") for part in (url.username, url.password))
    return {name: f"Basic {b64encode(login.encode()).decode()}"} if "@" in url.netloc else {}


def _proxy_of(url: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for a URL. Raises OSError for one of another kind."""
    text = getproxies().get(url.scheme, "")
    if not text or proxy_bypass(url.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    if proxy.scheme not in PORTS or not proxy.hostname:
        raise OSError(f"the environment's proxy for {url.scheme} is not http://HOST:PORT")
    return proxy


def _connection(url: SplitResult, proxy: SplitResult | None, silent: float) -> HTTPConnection:
    place = url if proxy is None else proxy
    scheme = url.scheme if proxy is None or url.scheme == "https" else proxy.scheme
    kind = HTTPSConnection if scheme == "https" else HTTPConnection
    connection = kind(place.hostname or "", place.port or PORTS[place.scheme], timeout=silent)
    if proxy is not None and url.scheme == "https":
        host, port = url.hostname or "", url.port or PORTS["https"]
        connection.set_tunnel(host, port, headers=login_header(proxy, "Proxy-Authorization"))
    return connection
