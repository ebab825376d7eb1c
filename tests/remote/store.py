"""Real servers: one that answers as a trace store does, with the traces of a capture of ours; one of bytes alone."""

import contextlib
import json
import socket
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PLANTED = Path(__file__).parents[2] / "traces" / "planted.jsonl"


@dataclass(frozen=True)
class Answer:
    """What is answered to a path; with status 0 nothing, and the connection ends."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


NONE = Answer(b'{"error":{"httpCode":404,"message":"trace not found"}}', 404)
PAGE = Answer(b"<!doctype html>\n<html><body>Log in</body></html>", 200, (("Content-Type", "text/html"),))


class Store:
    """Serves `answers` by path, the query left out, at `url` until `close`; `asked`: paths, headers."""

    def __init__(self, answers, otherwise=NONE, login=None):
        """`login`: an Authorization without which 401 is answered."""
        self.answers, self.asked, self.connections = dict(answers), [], set()
        self._otherwise = otherwise
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                with lock:
                    outer.asked.append((self.path, self.headers))
                    outer.connections.add(self.client_address)
                answer = outer.answer(self.path.partition("?")[0])
                if login is not None and self.headers["Authorization"] != login:
                    answer = Answer(b"who are you?", 401)
                if not answer.status:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in (*answer.headers, ("Content-Length", str(len(answer.body)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *words):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.host}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def answer(self, path):
        return self.answers.get(path, self._otherwise)

    @property
    def paths(self):
        return [path for path, _ in self.asked]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


class Raw:
    """Sends each of `answers` over a connection of its own and closes that, whatever it promised.

    `drips`: it goes on with a byte now and then, for as long as somebody listens.
    """

    def __init__(self, *answers, drips=False):
        self.asked, self._answers, self._drips, self._left = [], answers, drips, threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/metrics"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        for answer in self._answers:
            with contextlib.suppress(OSError), self._socket.accept()[0] as client:
                self.asked.append(client.recv(65536))
                client.sendall(answer)
                while self._drips and not self._left.wait(0.02):
                    client.sendall(b"x")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._left.set()
        self._socket.close()


def traces_of(capture=PLANTED):
    """(id of the first request's trace, id -> its resourceSpans) of a capture."""
    traces, requests = defaultdict(list), []
    for line in Path(capture).read_text("utf-8").splitlines():
        for part in json.loads(line)["resourceSpans"]:
            for scope in part["scopeSpans"]:
                for span in scope["spans"]:
                    one = {**scope, "spans": [span]}
                    traces[span["traceId"]].append({"resource": part["resource"], "scopeSpans": [one]})
                    requests += [span["traceId"]] if span["name"] == "decode_step" else []
    return requests[0], dict(traces)


def result(parts):
    """As the API v3 of Jaeger answers."""
    return json.dumps({"result": {"resourceSpans": parts}}).encode()


def jaeger(traces, before="", wrapped=result):
    """What Jaeger answers at each path, under a prefix."""
    return {f"{before}/api/v3/traces/{trace}": Answer(wrapped(parts)) for trace, parts in traces.items()}
