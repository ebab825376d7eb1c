"""A real server on a free port, in this process: its engine can be looked at."""

import asyncio
import threading
from contextlib import contextmanager

import httpx2

from specscope.serve.server import Serving, bind
from specscope.serve.service import ServeOptions
from tests.waiting import HANG_SECONDS, wait_for

# A client a call would load the certificates each time, in a twentieth of a second of the processor
http = httpx2.Client(
    verify=False, timeout=HANG_SECONDS, limits=httpx2.Limits(max_keepalive_connections=0), trust_env=False
)


class Running:
    """Serves from when it is made until `stop`."""

    def __init__(self, engine, **options):
        self.engine = engine
        self.options = ServeOptions(port=0, **{"shutdown_seconds": 5.0, **options})
        bound = bind(self.options)
        self.address = bound.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.serving = Serving(engine, self.options, bound)
        self.error = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(HANG_SECONDS)

    def _run(self):
        async def run():
            self.loop = asyncio.get_running_loop()
            await self.serving.run(self._ready.set)

        try:
            asyncio.run(run())
        except Exception as error:
            self.error = error
        finally:
            self._ready.set()

    def ask_to_stop(self):
        self.loop.call_soon_threadsafe(self.serving.stop)

    def stop(self):
        if self._thread.is_alive():
            self.ask_to_stop()
            self.ask_to_stop()
        self.join()

    def join(self):
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()

    @property
    def blocks(self):
        return self.engine.runner.cache.pool.used

    @property
    def waiting(self):
        return len(self.serving.service.router)

    def post(self, path, body, **options):
        return http.post(self.url + path, json=body, **options)

    def complete(self, prompt="abcabcab", **asked):
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8, **asked})

    def chat(self, text="hello hello", **asked):
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8, **asked})

    def empty(self):
        """Wait until nothing runs."""
        return wait_for(lambda: not self.waiting and not self.blocks)


@contextmanager
def running(engine, **options):
    server = Running(engine, **options)
    try:
        yield server
    finally:
        server.stop()
        engine.bus.close()
