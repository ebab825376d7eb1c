"""Traces straight from their store, Jaeger or Tempo: a request's, and those of the engine steps that it links to.

Pages are fetched over HTTP, each within a time and a size, several at once. Proxies are those that the environment
names.
"""

from __future__ import annotations

import atexit
import base64
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

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
            said = f"the store answered {error}"
            login = (3, f"{said}: give a login with --header 'Name: value'")
            gone = (1, f"the store has no such trace ({error})")
            refusals.append(login if error.status in LOGIN else gone if error.status in GONE else (2, said))
        except _NoJsonError as error:
            refusals.append((0, f"this is not a trace store: it answered {error}"))
        except UserError as error:
            raise UserError(f"{address}: {error}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{address} cannot be reached: {first_line(error)}") from None
        else:
            if spans:
                return api, lines, spans
            refusals.append((1, "the store has no such trace (its response holds no spans)"))
    raise UserError(f"{address}: {max(refusals)[1]}")


def _fetch_steps(
    get: Get, traces: list[str], file: BinaryIO, progress: Callable[[float], None] | None, end: Callable[[], None]
) -> tuple[str, ...]:
    """Fetch engine steps into the file, several at once; a note of what is missing. `end`: ends what is under way.

    Raises OSError of the file.
    """
    asked, lock, room, known = traces[:MOST_STEPS], threading.Lock(), LARGEST_ALL, 0
    failures: list[str] = []

    def fetch(trace: str) -> None:
        nonlocal room, known
        if len(failures) >= MOST_FAILURES or room <= 0:
            return
        lines, failure = b"", ""
        try:
            lines, spans = get(trace)
            lines = lines if spans else b""
        except (StatusError, _NoJsonError) as error:
            is_gone = isinstance(error, StatusError) and error.status in GONE
            failure = "" if is_gone else f"the store answered {error}"
        except (OSError, ValueError, UserError) as error:
            failure = first_line(error)
        with lock:
            failures.extend([failure] if failure else [])
            known += not failure  # it is there, or gone
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
    missing = f"{len(traces) - known} of {plural(len(traces), 'engine step')}"
    return (f"{missing} that the trace links to were not fetched{why}",) if known < len(traces) else ()


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


CLOSED = "its client was closed"
KEPT = ("User-Agent", "Accept", "Accept-Encoding", "Proxy-Authorization")  # headers for whoever answers
MOST_LEFT = 64  # pages that nobody waits for any more and that still come


class StatusError(OSError):
    """The server answered, and not with a page."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}".strip())
        self.status = status


class HttpClient:
    """Fetches pages, from several threads at once. Each has a thread of its own: no timeout of a socket ends one that
    comes byte after byte, in its headers or below them, so that the wait for it ends instead.
    """

    def __init__(self, silent: float, whole: float) -> None:
        """`silent`: seconds that a server may be silent; `whole`: seconds that a page may take."""
        self._silent, self._whole = silent, whole
        self._closed = Future[bytes]()
        self._room = threading.Semaphore(MOST_LEFT)

    def get(self, url: str, limit: int, headers: Mapping[str, str]) -> bytes:
        """The page, or its first `limit` bytes. The URL's login is sent as one, unless the headers have another.

        Raises StatusError, other OSErrors and ValueError, and TimeoutError where it takes too long.
        """
        page = Future[bytes]()

        def read() -> None:
            try:
                page.set_result(_read_page(url, limit, headers, self._silent))
            except Exception as error:
                page.set_exception(error)
            self._room.release()

        if not self._closed.done() and self._room.acquire(blocking=False):
            threading.Thread(target=read, name="specscope-page", daemon=True).start()
            wait((page, self._closed), self._whole, FIRST_COMPLETED)
        if self._closed.done():  # also where a page arrives, or breaks off, in the same moment
            raise OSError(CLOSED)
        if not page.done():
            raise TimeoutError(f"its page did not arrive within {self._whole:g} s")
        return page.result()

    def close(self) -> None:
        """End what is under way, with an error there."""
        if not self._closed.done():
            self._closed.set_result(b"")


def _read_page(url: str, limit: int, headers: Mapping[str, str], silent: float) -> bytes:
    import requests

    class Session(requests.Session):
        def rebuild_auth(self, prepared_request: Any, response: Any) -> None:  # noqa: ANN401
            """As requests calls it. Another server is told nothing that was meant for the first."""
            if self.should_strip_auth(response.request.url, prepared_request.url):
                for name in {*prepared_request.headers} - {*KEPT}:
                    del prepared_request.headers[name]

    url, login = _split_login(url)
    sent = {"User-Agent": "specscope", "Accept-Encoding": "identity", **login}
    sent |= {name.title(): value for name, value in headers.items()}
    try:
        with Session() as session:
            session.max_redirects = 5
            # `auth`: none from ~/.netrc
            with session.get(url, headers=sent, timeout=silent, stream=True, auth=lambda asked: asked) as answer:
                if answer.status_code // 100 != 2:
                    raise StatusError(answer.status_code, answer.reason or "")
                content = bytearray()
                for piece in answer.iter_content(2**16):
                    content += piece
                    if len(content) >= limit:
                        break
                return bytes(content[:limit])
    except requests.RequestException as error:
        why: BaseException = error
        while (inner := why.__cause__ or why.__context__) is not None:
            why = inner
        raise OSError(str(why)) from None


def _split_login(url: str) -> tuple[str, dict[str, str]]:
    """A URL without its user and password, and the header for these; none where it has none."""
    parts = urlsplit(url)
    login = ":".join(unquote(part or "") for part in (parts.username, parts.password))
    header = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if "@" in parts.netloc else {}
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl(), header
