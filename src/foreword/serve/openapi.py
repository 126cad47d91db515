"""GET /openapi.json: the endpoints and the fields of their bodies, from the tables that serve them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import Route

from foreword.serve.fields import Object
from foreword.serve.service import VERSION

SCHEMAS = "#/components/schemas/"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REFUSALS = {
    400: "A field cannot be used; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Pages of this origin may not ask.",
    404: "There is no such model.",
    408: "The body took too long.",
    409: "The server is busy with other requests.",
    413: "The body is too large.",
    429: "Too many requests wait; Retry-After says when to try again.",
    500: "The server failed.",
    503: "The server starts, stops, or its engine is dead.",
    504: "The request took longer than the server's limit.",
}


@dataclass(frozen=True)
class Endpoint:
    """One endpoint: what serves it, and what /openapi.json says of it. `body`: the struct of its fields."""

    method: str
    path: str
    serve: Callable[..., Any]
    summary: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    kind: str = "application/json"  # of its answer

    def route(self) -> Route:
        return Route(self.path, self.serve, methods=[self.method])


def document(endpoints: Sequence[Endpoint]) -> Object:
    """Return the document."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template=SCHEMAS + "{name}")
    paths: Object = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path.replace(":path", ""), {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foreword", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> Object:
    error = {"content": {"application/json": {"schema": {"$ref": SCHEMAS + "Error"}}}}
    answers: Object = {str(status): {"description": text, **error} for status, text in REFUSALS.items()}
    content: Object = {endpoint.kind: {}}
    if endpoint.streams:
        content["text/event-stream"] = {}
    found: Object = {"summary": endpoint.summary, "responses": {"200": {"description": "The answer.", "content": content}}}
    if endpoint.path in ("/health", "/ready"):
        answers["503"] = {"description": "It is not.", "content": {"application/json": {}}}
    found["responses"] |= answers
    if "{model" in endpoint.path:
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.body is not None:
        schema = {"$ref": SCHEMAS + endpoint.body.__name__}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found
