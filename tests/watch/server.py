"""A real HTTP server of one page, which a test changes as it goes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Page:
    """Serves `pages` one after the other, the last of them again and again, until `close`."""

    def __init__(self, *pages):
        self.pages = list(pages)
        self.served = 0
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = outer.next().encode() if self.path == "/metrics" else b"not found"
                self.send_response(outer.status if self.path == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def next(self):
        at = min(self.served, len(self.pages) - 1)
        self.served += 1
        return self.pages[at]

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/metrics"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
