"""The OpenAPI page, generated from the structs that requests are read into and answers are written from."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

import specscope
from specscope.serve.errors import JSON, TYPES, ErrorBody
from specscope.serve.requests import MODEL, PROMPT, REFUSED, TOKEN, ChatRequest, CompletionRequest
from specscope.serve.responses import ChatChunk, ChatCompletion, Completion, ModelList, Version
from specscope.trace.metrics.metrics import OPENMETRICS, PLAIN

STRUCTS = (CompletionRequest, ChatRequest, Completion, ChatCompletion, ChatChunk, ModelList, Version, ErrorBody)


def page(model: str, max_context: int, vocabulary: int) -> bytes:
    """The page of a server of this model, as JSON."""
    schemas, components = msgspec.json.schema_components(STRUCTS, ref_template="#/components/schemas/{name}")
    refs = dict(zip(STRUCTS, schemas, strict=True))
    components[CompletionRequest.__name__]["properties"]["prompt"] = copy.deepcopy(PROMPT)
    _fill(components, model, vocabulary)
    generate = {
        "completions": (CompletionRequest, Completion, Completion),
        "chat/completions": (ChatRequest, ChatCompletion, ChatChunk),
    }
    paths: dict[str, Any] = {
        f"/v1/{name}": {"post": _operation(name, refs[answer], refs, body=refs[asked], event=refs[event])}
        for name, (asked, answer, event) in generate.items()
    }
    paths["/v1/models"] = {"get": _operation("models", refs[ModelList], refs)}
    paths["/version"] = {"get": _operation("version", refs[Version], refs, guarded=False)}
    paths["/health"] = {"get": _operation("health", None, refs, guarded=False)}
    paths["/metrics"] = {
        "get": _operation("metrics", {"type": "string"}, refs, kinds=(PLAIN, OPENMETRICS), guarded=False)
    }
    paths["/openapi.json"] = {"get": _operation("openapi", {"type": "object"}, refs, guarded=False)}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "specscope serve",
            "version": specscope.__version__,
            "description": f"{model}, {max_context} tokens of context",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
    return msgspec.json.encode(document)


def _operation(
    name: str,
    answer: Any,  # noqa: ANN401
    refs: dict[Any, Any],
    *,
    body: Any = None,  # noqa: ANN401
    event: Any = None,  # noqa: ANN401
    kinds: tuple[str, ...] = (JSON,),
    guarded: bool = True,
) -> dict[str, Any]:
    content = {} if answer is None else {kind: {"schema": answer} for kind in kinds}
    if body is not None:
        content["text/event-stream"] = {"schema": _stream(event, refs[ErrorBody])}
    failed = {"description": "An error", "content": {JSON: {"schema": refs[ErrorBody]}}}
    statuses = TYPES if body is not None else (401, 405, 503) if guarded else (405, 503)
    operation: dict[str, Any] = {
        "operationId": name.replace("/", "_"),
        "responses": {"200": {"description": "The answer", "content": content}} | {str(s): failed for s in statuses},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return operation | ({"security": [{"key": []}, {}]} if guarded else {})


def _stream(event: Any, error: Any) -> dict[str, Any]:  # noqa: ANN401
    """Each event of a stream; the last one is [DONE]."""
    chunk = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [event, error]}}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, chunk]}}}


def _fill(node: object, model: str, vocabulary: int) -> None:
    """Fill in what only this server knows: its model's name, and the size of the vocabulary."""
    if isinstance(node, list):
        for child in node:
            _fill(child, model, vocabulary)
    if not isinstance(node, dict):
        return
    if node.pop(MODEL, False):
        node["enum"] = ["", model]
    if node.pop(TOKEN, False):
        node["maximum"] = vocabulary - 1
    node.pop(REFUSED, None)
    for child in node.values():
        _fill(child, model, vocabulary)
