"""Errors as HTTP answers: an exception -> a status and the JSON body that OpenAI's clients read.

A message has at most 1,000 characters and never holds the body of a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from foreword.errors import EngineError, InputError, NumericsError, QueueFull

LONGEST_MESSAGE = 1000
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CODES = {413: "body_too_large", 429: "queue_full", 500: "internal_error", 503: "unavailable"}
RETRY_S = 1


class Refusal(Exception):
    """A request that gets an error for an answer. `param`: the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code or CODES.get(status)
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """Return the body of the answer."""
        message = shortened(str(self))
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"Cache-Control": "no-store", **self.headers}
        return Response(json.dumps(self.content()), self.status, headers, media_type="application/json")


class ClientGone(Exception):
    """The client has closed the connection: nobody reads an answer."""


def shortened(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else f"{message[: LONGEST_MESSAGE - 4]} ..."


def refused(error: BaseException, fields: Mapping[str, str] | None = None) -> Refusal:
    """Return the answer to an exception. `fields`: those that the client gave, by the names of
    their settings."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InputError):
        return Refusal(400, str(error), param=_blamed(str(error), fields or {}))
    if isinstance(error, QueueFull):
        return Refusal(429, str(error), headers={"Retry-After": str(RETRY_S)})
    if isinstance(error, NumericsError):
        return Refusal(500, str(error), code="numerics_error")
    if isinstance(error, EngineError):
        return Refusal(503, str(error), code="engine_error")
    return Refusal(500, "the server failed on this request; its log says why, next to the X-Request-Id of this answer")


def _blamed(message: str, fields: Mapping[str, str]) -> str | None:
    """Return the field whose setting a message names first."""
    found = re.search(rf"\b({'|'.join(map(re.escape, fields))})\b", message) if fields else None
    return fields[found[0]] if found else None
