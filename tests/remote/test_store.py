"""A trace from a store over real HTTP: what is asked for, what the file holds, and what is said where it fails.

And the HTTP client: redirections, proxies, and pages that end early. Servers that drip are
tested in tests/watch/test_source.py, by a reader that uses this client.
"""

import base64
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.remote import store as stores
from specscope.remote.attached import KEPT_LINES, EngineLog, LaunchedEngine, end_of, last_lines
from specscope.remote.store import HttpClient, StatusError, fetch_capture
from specscope.trace.stored import StoreAddress
from specscope.tui.app import ScopeApp
from tests.remote.store import NONE, PAGE, Answer, Raw, Store, jaeger, result, traces_of
from tests.tui.sample import until as shown
from tests.waiting import ends, until

REQUEST, TRACES = traces_of()
STEPS = set(TRACES) - {REQUEST}


def fetched(url, headers=None, progress=None):
    """(the capture, the ids of the traces of its lines, in order)."""
    capture = fetch_capture(StoreAddress.read(url), headers or {}, progress)
    lines = capture.files[0].read_bytes().splitlines()
    return capture, [next(iter(stores._spans(json.loads(line))))["traceId"] for line in lines]


def test_the_request_comes_first_and_its_engine_steps_each_once():
    shares = []
    with Store(jaeger(TRACES, "/jaeger")) as store:
        capture, traces = fetched(f"{store.url}/jaeger/trace/{REQUEST}?uiFind=x#y", progress=shares.append)
    assert traces[0] == REQUEST
    assert sorted(traces[1:]) == sorted(STEPS)  # each once
    assert set(store.paths) == {f"/jaeger/api/v3/traces/{trace}" for trace in TRACES}
    assert capture == f"{store.url}/jaeger/trace/{REQUEST}"
    assert capture.notes == ()
    assert shares == [number / len(STEPS) for number in range(1, len(STEPS) + 1)]
    assert stat.S_IMODE(os.stat(capture.files[0]).st_mode) == 0o600
    line = capture.files[0].read_bytes().splitlines()[0]
    assert json.loads(line) == {"result": {"resourceSpans": TRACES[REQUEST]}}


def tempo(parts):
    """As Tempo writes JSON: ids in base64, under other names."""
    text = json.dumps({"batches": parts})
    for trace in TRACES:
        text = text.replace(trace, base64.b64encode(bytes.fromhex(trace)).decode())
    return text.encode()


in_lines = b"\n".join  # as the API v3 of older versions streams it


@pytest.mark.parametrize("wrapped", [tempo, lambda parts: in_lines(result([part]) for part in parts)])
def test_whatever_the_answer_is_wrapped_in_its_steps_are_found(wrapped):
    with Store(jaeger(TRACES, wrapped=wrapped)) as store:
        capture, _ = fetched(f"{store.url}/trace/{REQUEST}")
    assert len(store.paths) == len(TRACES)
    lines = capture.files[0].read_bytes().splitlines()
    assert sum(len(list(stores._spans(json.loads(line)))) for line in lines) == sum(map(len, TRACES.values()))


@pytest.mark.parametrize("otherwise", [NONE, PAGE, Answer(b"", 400)], ids=["404", "page", "400"])
def test_the_older_api_is_a_way_out_and_is_then_kept_to(otherwise):
    answers = {path.replace("/v3", ""): answer for path, answer in jaeger(TRACES, "/p").items()}
    with Store(answers, otherwise) as store:
        fetched(f"{store.url}/p/api/traces/{REQUEST}?start=1")
    assert store.paths[0] == f"/p/api/v3/traces/{REQUEST}?start=1"
    assert set(store.paths[1:]) == {f"/p/api/traces/{trace}?start=1" for trace in TRACES}


def test_engine_steps_that_are_gone_are_no_error_and_a_store_that_fails_is_asked_no_more(monkeypatch):
    answers, failing = jaeger(TRACES), Answer(b"", 503)
    gone = min(STEPS)
    with Store({path: answer for path, answer in answers.items() if gone not in path}) as store:
        capture, traces = fetched(f"{store.url}/trace/{REQUEST}")
        assert (len(traces), capture.notes) == (len(TRACES) - 1, ())
        store.answers = {f"/api/v3/traces/{REQUEST}": answers[f"/api/v3/traces/{REQUEST}"]}
        store.answers |= {f"/api/v3/traces/{trace}": failing for trace in STEPS}
        store.asked.clear()
        monkeypatch.setattr(stores, "AT_ONCE", 1)
        capture, traces = fetched(f"{store.url}/trace/{REQUEST}")
    assert traces == [REQUEST]
    of = f"{len(STEPS)} of {len(STEPS)} engine steps that the trace links to were not fetched"
    assert capture.notes == (f"{of}: the store answered 503 Service Unavailable",)
    assert len(store.paths) == 1 + stores.MOST_FAILURES


@pytest.mark.parametrize(("bound", "value", "steps"), [("MOST_STEPS", 4, 4), ("LARGEST_ALL", 1, 1)])
def test_how_many_and_how_much_is_bounded(monkeypatch, bound, value, steps):
    monkeypatch.setattr(stores, bound, value)
    monkeypatch.setattr(stores, "AT_ONCE", 1)
    with Store(jaeger(TRACES)) as store:
        capture, traces = fetched(f"{store.url}/trace/{REQUEST}")
    assert len(traces) == 1 + steps
    left = f"{len(STEPS) - steps} of {len(STEPS)} engine steps that the trace links to were not fetched, the limit"
    assert capture.notes == (left,)


def failure(store, answers, otherwise=NONE, url=""):
    store.answers = answers
    with pytest.raises(UserError) as caught:
        fetch_capture(StoreAddress.read(url or f"{store.url.replace('//', '//me:secret@')}/trace/{REQUEST}"), {})
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert f"{store.url}/trace/{REQUEST}" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (NONE, "the store has no such trace (404 Not Found)"),
        (Answer(b'{"result":{}}'), "the store has no such trace (its response holds no spans)"),
        (Answer(b"", 403), "the store answered 403 Forbidden: give a login with --header 'Name: value'"),
        (Answer(b"", 401), "the store answered 401 Unauthorized: give a login with --header"),
        (Answer(b"", 500), "the store answered 500 Internal Server Error"),
        (PAGE, "this is not a trace store: it answered with a web page: does it need a login"),
        (Answer(b"hello"), "this is not a trace store: it answered without JSON"),
        (Answer(b"[" * 100_000), "this is not a trace store: it answered without JSON"),
        (Answer(b" " * 2000), "the trace is larger than"),
        (
            Answer(b"", 302, (("Location", "ftp://h/"),)),
            "cannot be reached: No connection adapters were found for 'ftp://h/'",
        ),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(monkeypatch, answer, why):
    if why.endswith("larger than"):
        monkeypatch.setattr(stores, "LARGEST", 1000)
    with Store({}, answer) as store:
        assert why in failure(store, {})


def test_a_store_that_is_not_there_or_says_nothing(monkeypatch):
    with Store({}) as store:
        pass
    assert "cannot be reached: [Errno 111] Connection refused" in failure(store, {})
    monkeypatch.setattr(stores, "SILENT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "cannot be reached: timed out" in failure(store, {})


LOGIN = {"Authorization": "Bearer secret", "Accept": "text/plain"}


@pytest.fixture
def client():
    with contextlib.closing(HttpClient(10.0, 30.0)) as client:
        yield client


def moved(target, status=302):
    return Answer(b"", status, (("Location", target),))


def test_what_is_too_large_is_read_no_further_and_a_status_is_told(client):
    with Store({"/a": Answer(b"x" * 1000)}) as store:
        assert client.get(f"{store.url}/a?x=1", 10, {}) == b"x" * 10
        with pytest.raises(StatusError, match="404 Not Found"):
            client.get(f"{store.url}/none", 100, {})
        assert store.paths == ["/a?x=1", "/none"]


def test_a_page_that_ends_early_is_no_page(client):
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
    with Raw(half) as server, pytest.raises(OSError, match="more expected"):
        ends(client.get, server.url, 100, {})


def test_redirections_are_followed_and_another_server_hears_no_login(client):
    with Store({"/b": Answer(b"there")}) as other, Store({}) as store:
        store.answers = {"/a": moved("b", 308), "/b": moved(f"{other.url}/b"), "/round": moved("/round")}
        assert client.get(f"{store.url.replace('//', '//me:x@')}/a", 100, LOGIN) == b"there"
        assert [headers["Authorization"] for _, headers in store.asked] == ["Bearer secret"] * 2  # the header wins
        assert [(headers["Authorization"], headers["Accept"]) for _, headers in other.asked] == [(None, "text/plain")]
        with pytest.raises(OSError, match="Exceeded 5 redirects"):
            client.get(f"{store.url}/round", 100, {})
        store.answers["/a"] = moved("file:///etc/passwd")
        with pytest.raises(OSError, match="No connection adapters were found for 'file:///etc/passwd'"):
            client.get(f"{store.url}/a", 100, {})


def test_the_environments_proxy_is_used_and_no_proxy_is_heeded(client, monkeypatch):
    page = {"/p": Answer(b"page")}
    with Store(page) as store, Store({"http://nowhere.invalid:1/p": Answer(b"by proxy")}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//you:%40@"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert client.get(f"{store.url}/p", 100, {}) == b"page"
        assert client.get("http://me:x@nowhere.invalid:1/p", 100, {}) == b"by proxy"
        ((path, headers),) = proxy.asked
        assert path == "http://nowhere.invalid:1/p"
        assert (headers["Proxy-Authorization"], headers["Authorization"]) == ("Basic eW91OkA=", "Basic bWU6eA==")
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(OSError, match="Tunnel connection failed: 501"):  # asked for a tunnel, not for the page
            client.get("https://nowhere.invalid/p", 100, {})
        monkeypatch.setenv("http_proxy", "socks5://h:1")
        with pytest.raises(OSError, match="SOCKS"):
            client.get("http://nowhere.invalid:1/p", 100, {})


def test_what_is_under_way_ends_when_it_is_closed():
    """As by Ctrl-C while a server says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.closing(HttpClient(60.0, 60.0)) as client:
        asked = threading.Event()

        def close():
            with server.accept()[0] as connection:
                connection.recv(65536)
                asked.set()
                client.close()

        threading.Thread(target=close, daemon=True).start()
        with pytest.raises(OSError, match="client was closed"):
            ends(client.get, f"http://127.0.0.1:{server.getsockname()[1]}/", 100, {})
        assert asked.is_set()
        with pytest.raises(OSError, match="closed"):
            client.get("http://127.0.0.1:1/", 100, {})


WEIGHTS = "(Worker pid=7) ERROR 11-26 21:01:45 [executor.py:953] safetensors.SafetensorError: header too small\n"
DIES = f"""
(APIServer pid=3) INFO 11-26 21:01:00 [api.py:3] it begins

{WEIGHTS}Traceback (most recent call last):
  File "/x/entry.py", line 83, in main
RuntimeError: Engine core initialization failed. See root cause above.
"""


@contextmanager
def launched(folder, code):
    """(The control, its viewer) of a Python process that runs this code."""
    control = LaunchedEngine("vLLM")
    viewer = control.viewer = Viewer(control=control)
    output = folder / "log"
    with output.open("w") as log:
        process = subprocess.Popen([sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=log, stderr=log)
    control.follow(process, output)
    try:
        yield control, viewer
    finally:
        process.kill()
        process.communicate()
        control.close()


def test_its_log_is_read_as_it_grows(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"")
    log = EngineLog(path)
    assert not log.read()
    with path.open("ab") as file:
        for piece in (b"one\n\ntw", b"o\r\n\x1b[32mgreen\x1b[0m\nshards: 0%\rshards: 50%", b"\rshards: 100%\n"):
            file.write(piece)
            file.flush()
            assert log.read()
    assert log.lines == ("one", "two", "green", "shards: 100%")
    with path.open("ab") as file:
        file.write(b"(EngineCore pid=2) half a l\xffine")
    log.read()
    assert log.lines[-1] == "half a l�ine"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(10_000)))
    assert last_lines(path, 2) == ("9998", "9999")
    assert len(last_lines(path, 10_000)) == KEPT_LINES


@pytest.mark.parametrize(
    ("code", "killed", "error"),
    [
        (f"print({DIES!r}); raise SystemExit(3)", False, "exit code 3: safetensors.SafetensorError: header too small"),
        ("input()", True, "signal SIGKILL"),
        ("print('done')", False, ""),
    ],
)
def test_one_that_ends_says_how_and_why(tmp_path, code, killed, error):
    with launched(tmp_path, code) as (control, viewer):
        assert control.status == "loading"
        if killed:
            control._engine.kill()
        until(lambda: control.status == "ended", meanwhile=viewer.poll)
        assert control.error == error
        assert not viewer.live
        assert not control.log or control.log[-1] == "done" or control.log[-1].startswith("RuntimeError: Engine core")
    assert end_of(0) == "exit code 0"


async def test_the_screen_shows_the_log_while_it_loads_and_how_it_ended(tmp_path):
    ends = f"print({DIES!r}); raise SystemExit(3)"
    code = f"print('loading weights'); input(); print('specscope: watching it'); input(); {ends}"
    with launched(tmp_path, code) as (control, viewer):
        app = ScopeApp(viewer, title="vLLM")
        async with app.run_test(size=(80, 24)) as pilot:
            await shown(pilot, lambda: "loading weights" in said(app))
            assert "◌ loading" in said(app, "#status")
            assert not app.query_one("#requests").display
            press_enter(control)
            await shown(pilot, lambda: "watching it loading weights" in said(app))
            assert "○ idle" in said(app, "#status")
            press_enter(control)
            await shown(pilot, lambda: "■ failed" in said(app, "#status"))
            assert "it ended: exit code 3: safetensors.SafetensorError: header too small" in said(app)
            assert "RuntimeError: Engine core initialization failed" in said(app)


def said(app, panel="#tree"):
    return " ".join(text.strip() for line in app.query_one(panel).sheet.lines for text, _ in line)


def press_enter(control):
    control._engine.stdin.write(b"\n")
    control._engine.stdin.flush()
