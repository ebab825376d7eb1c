"""The HTTP client over real sockets: connections that are kept, redirections, proxies, and pages that end early.

Servers that drip are tested in tests/watch/test_source.py, by a reader that uses this client.
"""

import contextlib
import socket
import threading
from http.client import IncompleteRead

import pytest

from specscope.remote.store import HttpClient, StatusError
from tests.remote.store import Answer, Raw, Store
from tests.waiting import ends

LOGIN = {"Authorization": "Bearer secret", "Accept": "text/plain"}


@pytest.fixture
def client():
    with contextlib.closing(HttpClient(10.0, 30.0)) as client:
        yield client


def moved(target, status=302):
    return Answer(b"", status, (("Location", target),))


def test_a_connection_is_used_again_also_after_a_refusal(client):
    with Store({"/a": Answer(b"first"), "/b": Answer(b"second")}) as store:
        assert client.get(f"{store.url}/a", 100, {}) == b"first"
        with pytest.raises(StatusError, match="404 Not Found"):
            client.get(f"{store.url}/none", 100, {})
        assert client.get(f"{store.url}/b?x=1", 100, {}) == b"second"
        assert store.paths == ["/a", "/none", "/b?x=1"]
        assert len(store.connections) == 1


def test_a_page_that_is_too_large_is_read_no_further(client):
    with Store({"/a": Answer(b"x" * 1000)}) as store:
        assert client.get(f"{store.url}/a", 10, {}) == b"x" * 10
        assert client.get(f"{store.url}/a", 1000, {}) == b"x" * 1000  # what is left of the first is not taken for this


def test_a_connection_that_the_server_closed_meanwhile_is_replaced(client):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"  # which promises to leave it open
    with Raw(answer, answer) as server:
        assert [ends(client.get, server.url, 100, {}) for _ in range(2)] == [b"ok", b"ok"]
        assert len(server.asked) == 2


def test_a_page_that_ends_early_is_no_page(client):
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
    with Raw(half) as server, pytest.raises(IncompleteRead, match="more expected"):
        ends(client.get, server.url, 100, {})


def test_redirections_are_followed_and_another_server_hears_no_login(client):
    with Store({"/b": Answer(b"there")}) as other, Store({}) as store:
        store.answers = {"/a": moved("b", 308), "/b": moved(f"{other.url}/b"), "/round": moved("/round")}
        assert client.get(f"{store.url.replace('//', '//me:x@')}/a", 100, LOGIN) == b"there"
        assert [headers["Authorization"] for _, headers in store.asked] == ["Bearer secret"] * 2  # the header wins
        assert [(headers["Authorization"], headers["Accept"]) for _, headers in other.asked] == [(None, "text/plain")]
        with pytest.raises(StatusError, match="302"):
            client.get(f"{store.url}/round", 100, {})
        store.answers["/a"] = moved("file:///etc/passwd")
        with pytest.raises(OSError, match="redirects to what is no page"):
            client.get(f"{store.url}/a", 100, {})


def test_the_environments_proxy_is_used_and_no_proxy_is_heeded(client, monkeypatch):
    page = {"/p": Answer(b"page")}
    with Store(page) as store, Store({"http://nowhere.invalid:1/p": Answer(b"by proxy")}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//you:%40@"))
        monkeypatch.setenv("no_proxy", store.host)
        assert client.get(f"{store.url}/p", 100, {}) == b"page"
        assert client.get("http://me:x@nowhere.invalid:1/p", 100, {}) == b"by proxy"
        ((path, headers),) = proxy.asked
        assert path == "http://nowhere.invalid:1/p"
        assert (headers["Proxy-Authorization"], headers["Authorization"]) == ("Basic eW91OkA=", "Basic bWU6eA==")
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(OSError, match="Tunnel connection failed: 501"):  # asked for a tunnel, not for the page
            client.get("https://nowhere.invalid/p", 100, {})
        monkeypatch.setenv("http_proxy", "socks5://h:1")
        with pytest.raises(OSError, match=r"proxy for http is no http://HOST:PORT"):
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
