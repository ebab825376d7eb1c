"""A small server that answers as it is told to: real HTTP, known delays, known chunks. Standard library only."""

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field

from tests.waiting import HANG_SECONDS


@dataclass
class Piece:
    """A chunk of an answer: sent `after` so many seconds, with `text` of so many `tokens`."""

    text: str = "word "
    tokens: int = 1
    after: float = 0.0
    raw: str | None = None  # instead of a chunk


@dataclass
class Reply:
    """What becomes of a request."""

    pieces: list = field(default_factory=lambda: [Piece(), Piece()])
    status: int = 200
    body: object = None  # instead of a stream
    prompt_tokens: int = 7
    finish: str | None = "stop"
    done: bool = True  # [DONE] at the end
    usage: str = "each"  # each chunk tells it, the last one, or none
    cut: bool = False  # the connection breaks after the pieces
    silent: bool = False  # no answer, ever
    others: int = 0  # no answer before so many requests have come
    last: dict = field(default_factory=dict)  # more of the last chunk
    content_type: str = "text/event-stream"


class Server:
    """Runs in a thread. `reply` makes a Reply of (number, body); `metrics` the page of (requests so far)."""

    def __init__(self, reply=lambda number, body: Reply(), metrics=None, models=("tiny",), strict_options=()):
        self.reply, self.metrics, self.models = reply, metrics, models
        self.refused = strict_options  # stream options that get a 400
        self.bodies, self.headers, self.paths, self.times, self.wrote = [], [], [], [], []
        self.at_once = self.most = 0
        self.came = asyncio.Condition()

    def __enter__(self):
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()

        def run():
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(HANG_SECONDS)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        async def end():
            self._server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader, writer):
        line = await reader.readline()
        if not line:
            return False
        method, path, _ = line.decode().split()
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        self.paths.append(path)
        if method == "GET":
            return await self._page(path, writer)
        body = json.loads(data)
        self.times.append(time.perf_counter())
        self.headers.append(headers)
        options = body.get("stream_options", {})
        if any(name in options or (name == "stream_options" and options) for name in self.refused):
            return await self._plain(writer, 400, {"error": {"message": "unknown option"}})
        async with self.came:
            self.bodies.append(body)
            self.came.notify_all()
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            return await self._answer(self.reply(len(self.bodies) - 1, body), body, path, writer)
        finally:
            self.at_once -= 1

    async def _page(self, path, writer):
        if path == "/v1/models" and self.models is not None:
            return await self._plain(writer, 200, {"object": "list", "data": [{"id": name} for name in self.models]})
        if path == "/metrics" and self.metrics is not None:
            return await self._plain(writer, 200, self.metrics(len(self.bodies)), "text/plain")
        return await self._plain(writer, 404, {"error": {"message": "no such page"}})

    async def _plain(self, writer, status, body, kind="application/json"):
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        await writer.drain()
        return True

    async def _answer(self, reply, body, path, writer):
        if reply.silent:
            await asyncio.Event().wait()
        async with self.came:
            await self.came.wait_for(lambda: len(self.bodies) >= reply.others)
        if reply.status != 200 or reply.body is not None:
            return await self._plain(writer, reply.status, reply.body)
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {reply.content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        told, chat = body.get("stream_options", {}), path.endswith("/chat/completions")
        made = 0

        async def event(data):
            lines = (data if isinstance(data, str) else json.dumps(data)).split("\n")
            text = "".join(f"data: {line}\n" for line in lines).encode("utf-8", "replace") + b"\n"
            writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            await writer.drain()

        def chunk(text, finish=None):
            choice = {"delta": {"content": text}} if chat else {"text": text}
            found = {"id": "x", "choices": [{"index": 0, **choice, "finish_reason": finish}]}
            return found | (usage() if reply.usage == "each" and told.get("continuous_usage_stats") else {})

        def usage():
            counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": made}
            return {"usage": counts | {"total_tokens": reply.prompt_tokens + made}}

        if chat:
            await event(chunk(""))
        for piece in reply.pieces:
            await asyncio.sleep(piece.after)
            made += piece.tokens
            self.wrote.append(time.perf_counter())
            await event(chunk(piece.text) if piece.raw is None else piece.raw)
        if reply.cut:
            writer.transport.abort()
            return False
        if reply.finish:
            await event(chunk("", reply.finish))
        if reply.usage != "none" and told.get("include_usage"):
            await event({"id": "x", "choices": [], **usage(), **reply.last})
        if reply.done:
            await event("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
