"""What every request passes: ids, keys, origins, limits of size; and the plain endpoints behind them."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from foreword.serve import guard, static
from foreword.serve.app import OPEN
from foreword.serve.guard import MOST_TURNS, Turns
from foreword.serve.options import ServeOptions, digest

CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
KEYS = ("first", "second")


def test_a_key_is_needed_everywhere_but_where_it_is_not(serving: Any) -> None:
    async def ask() -> None:
        async with serving(key_digests=tuple(map(digest, KEYS))) as client:
            paths = [route.path.replace("{model:path}", "x") for route in client.http._transport.app.routes]
            free = OPEN | {*static.FILES}
            assert free < {*paths} and len(paths) > 10
            for path in paths:
                for method in ("GET", "POST"):
                    status = (await client.http.request(method, path)).status_code
                    assert (status != 401) == (method == "GET" and path in free), (method, path)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer first", 200),
        ("bearer second", 200),
        ("Bearer  second ", 200),
        ("Bearer third", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("first", 401),
        ("Basic first", 401),
        ("", 401),
    ],
)
def test_keys(serving: Any, header: str, status: int) -> None:
    async def ask() -> Any:
        async with serving(key_digests=tuple(map(digest, KEYS))) as client:
            return await client.post(CHAT, SAY, authorization=header)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer" and answer.json()["error"]["code"] == "invalid_api_key"


def test_options_do_not_show_keys() -> None:
    assert "first" not in repr(ServeOptions(key_digests=(digest("first"),)))


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("with space", False), ("", False)]
)
def test_the_id_of_a_request_is_echoed_or_made(serving: Any, given: str, echoed: bool) -> None:
    async def ask() -> list[str]:
        async with serving() as client:
            answers = [await client.post(CHAT, body, **{"x-request-id": given}) for body in (SAY, {}, b"{")]
            return [answer.headers["x-request-id"] for answer in answers]

    for name in asyncio.run(ask()):
        assert (name == given) is echoed
        assert echoed or re.fullmatch("req-[0-9a-f]{32}", name)


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        ("https://evil.example", (), 403),
        ("null", (), 403),
        ("http://[", (), 403),
        ("http://test", (), 200),
        ("https://good.example", ("https://good.example",), 200),
        ("https://evil.example", ("https://good.example",), 403),
        ("https://any.example", ("*",), 200),
    ],
)
def test_pages_of_other_origins(serving: Any, origin: str, allowed: tuple[str, ...], status: int) -> None:
    async def ask() -> Any:
        async with serving(allow_origins=allowed) as client:
            preflight = {"origin": origin, "access-control-request-method": "POST"}
            return await client.post(CHAT, SAY, origin=origin), await client.http.options(CHAT, headers=preflight)

    answer, preflight = asyncio.run(ask())
    assert answer.status_code == status
    named = status == 200 and bool(allowed)
    assert ("access-control-allow-origin" in answer.headers) is named
    assert (preflight.status_code == 200) is named


def test_a_preflight_needs_no_key(serving: Any) -> None:
    async def ask() -> Any:
        async with serving(key_digests=(digest("key"),), allow_origins=("https://good.example",)) as client:
            headers = {"origin": "https://good.example", "access-control-request-method": "POST"}
            return await client.http.options(CHAT, headers=headers), await client.post(CHAT, SAY, origin=headers["origin"])

    preflight, answer = asyncio.run(ask())
    assert preflight.status_code == 200 and answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://good.example"  # so that the page may read the error


async def pieces(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(serving: Any, chunked: bool) -> None:
    async def ask() -> Any:
        async with serving(max_body=1000) as client:
            content = pieces(1000, 10) if chunked else b" " * 10_000
            return await client.http.post(CHAT, content=content), await client.post(CHAT, SAY)

    answer, other = asyncio.run(ask())
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert answer.headers["connection"] == "close" and other.status_code == 200


def test_bodies_that_together_are_too_large(serving: Any, monkeypatch: Any) -> None:
    """Two wait for their ends, a third one is refused. When they have been answered there is room again."""

    async def ask() -> list[int]:
        async with serving(max_body=1000) as client:
            go_on = asyncio.Event()

            async def slowly() -> AsyncIterator[bytes]:
                yield b" " * 900
                await go_on.wait()
                yield b" " * 50

            waiting = [asyncio.create_task(client.http.post(CHAT, content=slowly())) for _ in range(2)]
            await asyncio.sleep(0.05)
            refused = await client.http.post(CHAT, content=b" " * 900)
            go_on.set()
            answers = [*await asyncio.gather(*waiting), refused, await client.http.post(CHAT, content=b" " * 900)]
            return [answer.status_code for answer in answers]

    monkeypatch.setattr(guard, "MOST_BODIES", 2)
    assert asyncio.run(ask()) == [400, 400, 503, 400]


def test_answers_are_not_stored(serving: Any) -> None:
    async def ask() -> list[Any]:
        async with serving() as client:
            stream = await client.post(CHAT, {**SAY, "stream": True})
            return [stream, await client.post(CHAT, SAY), await client.post(CHAT, {}), await client.http.get("/health")]

    answers = asyncio.run(ask())
    assert [answer.headers["cache-control"] for answer in answers] == ["no-store"] * 4
    assert answers[0].headers["x-accel-buffering"] == "no"
    assert answers[0].headers["content-type"] == "text/event-stream; charset=utf-8"


def test_a_failure_of_ours_is_logged_and_not_told(serving: Any, monkeypatch: Any, caplog: Any) -> None:
    async def ask(**more: Any) -> Any:
        async with serving() as client:
            monkeypatch.setattr(client.service.llm, "checked", lambda *_: 1 // 0)
            return await client.post(CHAT, SAY | more)

    for more in ({}, {"stream": True}):
        answer = asyncio.run(ask(**more))
        assert answer.status_code == 500 and "ZeroDivision" not in answer.text and answer.headers["x-request-id"]
    assert caplog.text.count("ZeroDivisionError") == 2


def test_other_paths_and_methods(serving: Any) -> None:
    async def ask() -> list[tuple[int, Any]]:
        async with serving() as client:
            asked = [("GET", "/nothing"), ("POST", "/v1/models"), ("GET", CHAT), ("DELETE", CHAT)]
            answers = [await client.http.request(*one) for one in asked]
            return [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]

    assert [status for status, _ in asyncio.run(ask())] == [404, 405, 405, 405]
    assert {code for _, code in asyncio.run(ask())} == {"not_found"}


def test_few_requests_begin_in_one_pass_of_the_loop() -> None:
    """In the order they came, those of clients that left excepted. A health check waits for none of them."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    async def come() -> None:
        turns = Turns(app, at_once=frozenset({"/health"}))

        def ask(path: str) -> asyncio.Task[None]:
            return asyncio.ensure_future(turns({"type": "http", "path": path}, None, None))  # type: ignore[arg-type]

        asked = [ask(f"/{number}") for number in range(5 * MOST_TURNS)]
        await asyncio.sleep(0)
        asked[MOST_TURNS].cancel()
        asked.append(ask("/health"))
        counts = []
        while len(begun) < len(asked) - 1:
            counts.append(len(begun))
            await asyncio.sleep(0)
        assert all(more - some <= MOST_TURNS + 1 for some, more in zip(counts, counts[1:], strict=False))
        assert begun.index("/health") < 3 * MOST_TURNS
        begun.remove("/health")
        assert begun == [f"/{number}" for number in range(5 * MOST_TURNS) if number != MOST_TURNS]
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(ask("/again"))

    asyncio.run(come())
    assert begun[-1] == "/again"
