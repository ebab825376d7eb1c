"""The HTTP side: routes, the key, streams, and errors in one shape."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import specscope
from specscope.remote.http import Application, Bodies, Refusal
from specscope.serve.calls import Call
from specscope.serve.errors import JSON, ApiError, of_refusal, stopping
from specscope.serve.forms import Body, Form
from specscope.serve.requests import ChatRequest, CompletionRequest, Sampling, StreamOptions, decode
from specscope.serve.service import Service

T = TypeVar("T")
GUARDED = "/v1/"  # paths that need the key; health and metrics are open to monitoring


def make_app(service: Service) -> Application:
    """The application with its routes, error handlers, key check and limits."""
    bodies = Bodies(service.options.limits, JSON)

    def generate(kind: type[Sampling]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            form, stream = await _begin(service, request, bodies, kind)
            return await _answer(request, form, stream)

        return endpoint

    async def models(request: Request) -> Response:
        run = service.engine.run_info
        known = {"id": service.model, "object": "model", "created": service.created, "owned_by": "specscope"}
        more = {"root": run.target, "parent": None, "max_model_len": run.max_context}
        return _json({"data": [known | more], "object": "list"})

    async def health(request: Request) -> Response:
        if not service.healthy:
            raise stopping()
        return Response()

    async def version(request: Request) -> Response:
        return _json({"version": specscope.__version__})

    async def metrics(request: Request) -> Response:
        text, kind = service.observed.page(",".join(request.headers.getlist("accept")))
        return Response(text, headers={"content-type": kind})

    def refuse(refusal: Refusal) -> Response:
        service.observed.refused(refusal.status)
        return of_refusal(refusal).response()

    async def refused(request: Request, refusal: Refusal) -> Response:
        return refuse(refusal)

    routes = [
        Route("/v1/completions", generate(CompletionRequest), methods=["POST"]),
        Route("/v1/chat/completions", generate(ChatRequest), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _refused,
        Refusal: refused,
        HTTPException: _no_route,
        ClientDisconnect: _left,
        Exception: _broken,
    }
    key = Middleware(Doorman, key=service.options.api_key)
    app = Starlette(routes=routes, middleware=[key], exception_handlers=handlers)
    return Application(app, service.options.host, refuse, service.options.limits)


class Doorman:
    """Lets requests with the key through."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if self._key is not None and scope["type"] == "http" and scope["path"].startswith(GUARDED):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._key):
                why = "missing or wrong API key: send Authorization: Bearer KEY"
                app = ApiError(401, why, headers={"www-authenticate": "Bearer"}).response()
        await app(scope, receive, send)


async def _begin(
    service: Service, request: Request, bodies: Bodies, kind: type[Sampling]
) -> tuple[Form, StreamOptions | None]:
    """A call on the engine, and how its answer is streamed. The body's memory is freed once it is tokenised."""
    async with bodies.of(request) as body:
        asked = decode(body, kind)
        form = await _while_there(request, service.start(asked, request.headers))
    return form, (asked.stream_options or StreamOptions()) if asked.stream else None


async def _answer(request: Request, form: Form, stream: StreamOptions | None) -> Response:
    """The answer, whole or as a stream; a client that disconnects cancels its requests."""
    if stream is not None:
        return EventStream(form.call, _events(form, stream))
    try:
        await _while_there(request, _finish(form.call))
    finally:
        form.call.close()
    return _json(form.whole())


async def _finish(call: Call) -> None:
    async for _ in call.pieces():
        pass


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work as long as the client is connected. Raises ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _events(form: Form, options: StreamOptions) -> AsyncIterator[bytes]:
    """Server-sent events: the pieces, then the usage where it was requested; or the error."""
    for event in form.begin():
        yield _event(event)
    try:
        async for piece in form.call.pieces():
            yield _event(form.piece(piece))
        if options.include_usage:
            yield _event(form.last())
    except ApiError as error:
        yield _event(error.body)
    yield b"data: [DONE]\n\n"


def _event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream whose end, however it comes, ends the call."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache"})
        self._call = call

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            self._call.close()


def _json(body: Body) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)


async def _refused(request: Request, error: ApiError) -> Response:
    return error.response()


async def _no_route(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow")
    if error.status_code == 405:
        message = f"{request.url.path} accepts {allowed}, not {request.method}"
        return ApiError(405, message, headers={"allow": allowed or ""}).response()
    paths = ", ".join(route.path for route in request.app.routes)
    message = f"unknown path {request.url.path[:200]}: there are {paths}"
    return ApiError(error.status_code, message).response()


async def _left(request: Request, error: Exception) -> Response:
    """The client has gone: nobody receives this answer."""
    return Response(status_code=499)


async def _broken(request: Request, error: Exception) -> Response:
    """An internal error: only its type is reported."""
    return ApiError(500, f"internal error: {type(error).__name__}").response()
