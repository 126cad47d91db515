"""GET /openapi.json: the endpoints, the fields of their bodies, and their answers, from the tables that serve them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import Route

from foreword.serve.answers import Error, Status
from foreword.serve.fields import Object
from foreword.serve.service import VERSION

SCHEMAS = "#/components/schemas/"
EVENT_STREAM = "text/event-stream"
REFUSALS = {
    400: "The request cannot be used; `param` names the field to blame.",
    401: "The API key is missing or wrong.",
    403: "This is not allowed: pages of this origin may not ask, or the method is fixed.",
    404: "There is no such model.",
    408: "The body took too long.",
    409: "The server is busy with other requests.",
    413: "The body is too large.",
    429: "Too many requests wait; Retry-After says when to try again.",
    431: "The head of the request is too large.",
    500: "The server failed.",
    503: "The server starts or stops, its engine is dead, or its memory is full.",
    504: "The request took longer than the server's limit.",
}
OF_ALL = (400, 403, 431, 500, 503)
WITH_KEY = (401,)
WITH_BODY = (404, 408, 413)
WITH_ENGINE = (429, 504)


@dataclass(frozen=True)
class Endpoint:
    """One endpoint: what serves it, and what /openapi.json says of it.

    `answer`: the struct of its answer; None: it is no JSON with fields. `body`: that of its fields. `event`: that of an
    event, if it streams. `also`: errors that others do not give."""

    method: str
    path: str
    serve: Callable[..., Any]
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    kind: str = "application/json"  # of its answer
    also: tuple[int, ...] = ()

    def route(self) -> Route:
        return Route(self.path, self.serve, methods=[self.method])

    @property
    def structs(self) -> list[type[msgspec.Struct]]:
        return [one for one in (self.body, self.answer, self.event) if one is not None]


def document(endpoints: Sequence[Endpoint], open_paths: Collection[str]) -> Object:
    """Return the document. `open_paths`: those that need no key."""
    structs = dict.fromkeys(struct for endpoint in endpoints for struct in endpoint.structs)
    _, components = msgspec.json.schema_components([*structs, Error], ref_template=SCHEMAS + "{name}")
    paths: Object = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, endpoint.path in open_paths)
        paths.setdefault(endpoint.path.replace(":path", ""), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foreword", "version": VERSION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],  # a server without keys asks for none
    }


def _operation(endpoint: Endpoint, is_open: bool) -> Object:
    content: Object = {endpoint.kind: {"schema": _reference(endpoint.answer)}}
    if endpoint.event is not None:
        about = f"Server-sent events. The data of each is a {endpoint.event.__name__}."
        content[EVENT_STREAM] = {"schema": {"type": "string", "description": about}}
    found: Object = {"summary": endpoint.summary, "responses": {"200": {"description": "The answer.", "content": content}}}
    for status in sorted({*OF_ALL, *endpoint.also, *(() if is_open else WITH_KEY), *(WITH_BODY if endpoint.body else ())}):
        found["responses"][str(status)] = {"description": REFUSALS[status], "content": _json(Error)}
    if endpoint.answer is Status:
        found["responses"]["503"] = {"description": "It is not.", "content": _json(Status)}
    if is_open:
        found["security"] = []
    if "{model" in endpoint.path:
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.body is not None:
        found["requestBody"] = {"required": True, "content": _json(endpoint.body)}
    return found


def _json(struct: type[msgspec.Struct]) -> Object:
    return {"application/json": {"schema": _reference(struct)}}


def _reference(struct: type[msgspec.Struct] | None) -> Object:
    return {} if struct is None else {"$ref": SCHEMAS + struct.__name__}
