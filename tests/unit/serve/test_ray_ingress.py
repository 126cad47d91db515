"""What Ray's proxy does with a request before and after a replica has it, tried on small ASGI applications. Without Ray."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from foreword.serve.ray import ingress
from foreword.serve.ray.ingress import middlewares, session_of

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
PLAIN = [(b"content-type", b"text/plain"), (b"retry-after", b"7")]


def asked(app: Any, body: bytes = b"{}", path: str = "/v1/completions", method: str = "POST", **headers: str) -> Any:
    """Ask an application behind the middleware of the proxy. Return the scope that it saw, and what was sent back."""
    seen: list[Any] = []
    sent: list[Any] = []

    async def recording(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await app(scope, receive, send)

    parts = [body[:1], body[1:]]

    async def receive() -> Any:
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    whole: Any = recording
    for one in middlewares():
        whole = one.cls(whole, *one.args, **one.kwargs)
    head = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(whole({"type": "http", "method": method, "path": path, "headers": head}, receive, send))
    return (seen[0] if seen else None), sent


def sends(status: int, headers: Any, *bodies: bytes, ends: bool = True) -> Callable[..., Any]:
    """Return an application that reads its body and answers this. `ends`: whether the last body says that it is the last."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for place, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": not (ends and place == len(bodies) - 1)})

    return app


def error_of(sent: list[Any]) -> tuple[int, dict[str, str], Any]:
    start, body = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert headers["content-type"] == "application/json" and not body.get("more_body", False)
    return start["status"], headers, json.loads(body["body"])["error"]


@pytest.mark.parametrize(
    ("body", "session"),
    [
        (b'{"prompt_cache_key": "a", "messages": [{"content": "b"}]}', "a"),
        (b'{"prompt_cache_key": null}', None),
        (b'{"prompt_cache_key": 5}', None),
        (b'{"prompt": "prompt_cache_key"}', None),
        (b"[1]", None),
        (b'{"prompt_cache_key": "a"', None),
        (b'{"x": ' + b"[" * 100_000 + b"}", None),
        (b"\xff", None),
    ],
)
def test_the_session_in_a_body(body: bytes, session: str | None) -> None:
    assert session_of(body) == session


@pytest.mark.parametrize(
    ("body", "headers", "routed"),
    [
        (b'{"prompt_cache_key": "a"}', {}, b"a"),
        (b'{"prompt_cache_key": "a"}', {"x_session_id": "b"}, b"a"),
        (b"{}", {"x_session_id": "b"}, b"b"),
        (b'{"prompt_cache_key": "\\u00e9\\n"}', {}, b"\\xe9\n"),
        (b"{}", {}, None),
    ],
)
def test_a_request_is_routed_by_its_session(body: bytes, headers: dict[str, str], routed: bytes | None) -> None:
    scope, _ = asked(sends(200, JSON, b"{}"), body, **headers)
    assert dict(scope["headers"]).get(b"x-session-id") == routed
    assert [name for name, _ in scope["headers"]].count(b"x-session-id") == (routed is not None)


def test_a_replica_gets_the_whole_body_once() -> None:
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.extend([await receive(), await receive()])
        await sends(200, JSON, b"{}")(scope, receive, send)

    asked(app, b'{"prompt": "hello"}')
    assert [one["type"] for one in got] == ["http.request", "http.disconnect"] and got[0]["body"] == b'{"prompt": "hello"}'


def test_a_body_that_is_too_large_is_refused_before_it_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ingress.MAX_BODY_VARIABLE, "10")
    scope, sent = asked(sends(200, JSON, b"{}"), b'{"prompt": "hello"}')
    assert scope is None and error_of(sent)[0] == 413


def test_a_client_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "BODY_S", 0.05)

    async def never() -> Any:
        await asyncio.sleep(30)

    async def ask() -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        (inner, *others), whole = middlewares(), sends(200, JSON, b"{}")
        for one in (inner, *others):
            whole = one.cls(whole, *one.args, **one.kwargs)
        await whole({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, never, send)
        return sent

    assert error_of(asyncio.run(ask()))[0] == 408


def test_answers_pass_as_they_are() -> None:
    """An error of a replica too: it has our form already. The id of a request, which proxy and replica add, comes once."""
    _, sent = asked(sends(429, [*JSON, (b"x-request-id", b"a"), (b"x-request-id", b"a")], b'{"error"', b": 1}"))
    assert sent[0]["status"] == 429 and b"".join(one["body"] for one in sent[1:]) == b'{"error": 1}'
    assert [value for name, value in sent[0]["headers"] if name == b"x-request-id"] == [b"a"]
    _, whole = asked(sends(200, STREAM, b"data: 1\n\n", b"data: [DONE]\n\n"))
    assert [one["body"] for one in whole[1:]] == [b"data: 1\n\n", b"data: [DONE]\n\n"]


def test_a_full_queue() -> None:
    status, headers, error = error_of(asked(sends(429, PLAIN, b"Request dropped due to backpressure"))[1])
    assert (status, headers["retry-after"], error["code"]) == (429, "7", "queue_full")
    assert error["message"] == "all replicas are busy, and as many requests wait as may; try again later"


@pytest.mark.parametrize(("given", "status"), [(404, 503), (503, 503), (408, 408)])
def test_other_errors_of_the_proxy(given: int, status: int) -> None:
    """404: there is no application, since every path is ours."""
    found, headers, error = error_of(asked(sends(given, PLAIN[:1], b"no replica"))[1])
    assert found == status and error["message"] and ("retry-after" in headers) == (status == 503)


def test_a_replica_that_dies_before_it_answers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    status, headers, error = error_of(asked(app)[1])
    assert (status, error["code"], headers["retry-after"]) == (503, "replica_lost", "1")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_replica_that_dies_in_a_stream(path: str) -> None:
    """The client gets an error as its last event, and the answer is complete."""
    _, sent = asked(sends(200, STREAM, b"data: 1\n\n", ends=False), path=path)
    assert sent[1]["body"] == b"data: 1\n\n" and not sent[2]["more_body"]
    *name, data = sent[2]["body"].decode().strip().split("\n")
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert name == (["event: error"] if path == "/v1/responses" else [])


def test_another_answer_that_is_cut_stays_incomplete() -> None:
    """Its client sees that the connection ends too early."""
    _, sent = asked(sends(200, JSON, b'{"a', ends=False))
    assert len(sent) == 2 and sent[1]["more_body"]


def test_a_proxy_does_not_import_torch() -> None:
    program = (
        "import sys; from foreword.serve.ray.ingress import middlewares; middlewares(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
