"""Pages fetched over HTTP, each within a time and a size; several at once, over connections that are used again.

The timeout of a socket is for each read: a server that sends a byte now and then, in its headers or in its page, would
be waited for without end. Here a timer shuts the connection down. Proxies are those that the environment names.
"""

from __future__ import annotations

import socket
import string
import threading
from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from itertools import chain
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

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
            late = TimeoutError(f"its page did not come within {self._whole:g} s")
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
            if not _is_same_server(urlsplit(before), urlsplit(url)):
                sent = {name: sent[name] for name in ("User-Agent", "Accept") if name in sent}
        if not 200 <= answer.status < 300:
            raise StatusError(answer.status, answer.reason)
        return page

    def _answer(
        self, url: SplitResult, limit: int, headers: Mapping[str, str], deadline: _Deadline
    ) -> tuple[HTTPResponse, bytes]:
        if url.scheme not in PORTS or not url.hostname:
            raise OSError("it redirects to what is no page")
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


def _is_same_server(before: SplitResult, after: SplitResult) -> bool:
    """Whether what was meant for one may be told to the other: itself, or the same by TLS at its usual port."""
    first, second = ((url.scheme, url.hostname, url.port or PORTS.get(url.scheme)) for url in (before, after))
    return first == second or (first, second) == (("http", first[1], 80), ("https", first[1], 443))


def _proxy_of(url: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for a URL. Raises OSError for one of another kind."""
    text = getproxies().get(url.scheme, "")
    if not text or proxy_bypass(url.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    if proxy.scheme not in PORTS or not proxy.hostname:
        raise OSError(f"the environment's proxy for {url.scheme} is no http://HOST:PORT")
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
