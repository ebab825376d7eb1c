"""Errors in OpenAI's shape: {"error": {message, type, param, code}}, for every status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from specscope.errors import UserError
from specscope.remote.http import Refusal
from specscope.trace.record.params import PARAM_NAMES

JSON = "application/json"

LATER = {"retry-after": "1"}  # seconds
# By status, with vLLM's names
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A refusal, or a failure, as reported to the client."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body of every answer that is not a success, and the data of an error event in a stream.

        `param`: the field of the request that it is about; `code`: the HTTP status.
        """
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body), self.status, self.headers, JSON)


def of_refusal(refusal: Refusal) -> ApiError:
    """A request that the HTTP server refused before the application saw it."""
    more = ": --max-body raises it" if refusal.status == 413 else ""
    return ApiError(refusal.status, refusal.message + more, headers=refusal.headers)


def cannot_run(error: UserError) -> ApiError:
    """A request that the engine refuses, for the field with which the message begins, where it does."""
    name = str(error).split(maxsplit=1)[0].rstrip(":")
    return ApiError(400, str(error), name if name in PARAM_NAMES else None)


def full() -> ApiError:
    return ApiError(429, "the queue is full: try again later, or raise --max-queue", headers=LATER)


def stopping() -> ApiError:
    """The server is stopping: nothing new is accepted, and what did not finish in time fails with this error."""
    return ApiError(503, "the server is stopping: try again later", headers=LATER)
