"""What ends a request before its time, over a real connection: clients that leave, limits, a server that drains.

Whatever it was, the engine drops the request within a round, and the server goes on.
"""

import asyncio
import json
import re
from contextlib import suppress
from time import sleep
from typing import Any

import pytest

from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.serve import connection, generation
from foreword.serve import flow as flow_module
from foreword.serve.errors import ClientGone
from foreword.serve.flow import Flow

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
AT_ONCE_S = 5.0


def request(body: Any, path: str = CHAT, **headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(content)}", *map(": ".join, headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def answer_to(port: int, sent: bytes) -> bytes:
    """Send bytes, and return the answer when the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    found = await reader.read()
    writer.close()
    return found


def metric(service: Any, name: str) -> float:
    """Return the sum of a metric's samples."""
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", service.metrics.text().decode(), re.MULTILINE)
    return sum(map(float, found))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds take time, so that a request is still running when the test looks."""
    advance = Engine.advance
    monkeypatch.setattr(Engine, "advance", lambda engine, rounds=1: sleep(0.02) or advance(engine, rounds))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("abrupt", [True, False])
def test_a_client_that_leaves_frees_its_slot(listening: Any, llm: LLM, until: Any, stream: bool, abrupt: bool) -> None:
    async def ask() -> None:
        async with listening() as (service, port):
            before = metric(service, "foreword:aborts_total")
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request({**LONG, "stream": stream}))
            await until(lambda: bool(llm.engine.slots.running))
            if abrupt:
                writer.transport.abort()
            else:
                writer.close()
            await until(lambda: not llm.engine.busy and not service.admission.inside, AT_ONCE_S)
            assert metric(service, "foreword:aborts_total") == before + 1
            assert 'foreword:aborts_total{model_name="llama",reason="client"} 1.0' in service.metrics.text().decode()

    asyncio.run(ask())


@pytest.mark.usefixtures("slow")
def test_clients_that_leave_while_they_wait(listening: Any, llm: LLM, until: Any) -> None:
    """Two run, two wait for a slot; those that wait leave first."""

    async def ask() -> None:
        async with listening() as (service, port):
            writers = []
            for count in range(1, 5):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request({**LONG, "stream": True}))
                writers.append(writer)
                await until(lambda count=count: service.admission.inside == count)
            await until(lambda: len(llm.engine.slots.running) == 2 and len(llm.engine.waiting) == 2)
            for writer in writers[2:]:
                writer.transport.abort()
            await until(lambda: not llm.engine.waiting and service.admission.inside == 2, AT_ONCE_S)
            assert len(llm.engine.slots.running) == 2
            for writer in writers[:2]:
                writer.transport.abort()
            await until(lambda: not llm.engine.busy, AT_ONCE_S)

    asyncio.run(ask())


@pytest.mark.usefixtures("slow")
def test_a_client_that_leaves_while_its_prompt_is_encoded(listening: Any, llm: LLM, until: Any, monkeypatch: Any) -> None:
    async def ask() -> None:
        async with listening() as (service, port):
            begun, go_on = asyncio.Event(), asyncio.Event()
            loop, check = asyncio.get_running_loop(), service.llm.checked

            def slowly(*given: Any) -> Any:
                loop.call_soon_threadsafe(begun.set)
                asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
                return check(*given)

            monkeypatch.setattr(service.llm, "checked", slowly)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(LONG))
            await begun.wait()
            writer.transport.abort()
            await asyncio.sleep(0.05)
            go_on.set()
            await until(lambda: not service.admission.inside, AT_ONCE_S)
            assert not llm.engine.busy

    asyncio.run(ask())


@pytest.mark.usefixtures("slow")
def test_a_full_queue_refuses(listening: Any, llm: LLM, until: Any) -> None:
    async def ask() -> tuple[bytes, bytes]:
        async with listening(max_queued=1) as (service, port):
            tasks = [asyncio.create_task(answer_to(port, request(LONG))) for _ in range(3)]
            await until(lambda: service.admission.inside == 3)
            full = await answer_to(port, request(LONG, Connection="close"))
            many = await answer_to(port, request({**LONG, "n": 4}, Connection="close"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return full, many

    full, many = asyncio.run(ask())
    assert full.startswith(b"HTTP/1.1 429 ") and re.search(rb"\r\nretry-after: [1-9]\d*\r\n", full.lower())
    assert b'"code": "queue_full"' in full
    assert many.startswith(b"HTTP/1.1 400 ")  # it would never fit


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long(listening: Any, llm: LLM, until: Any, stream: bool) -> None:
    async def ask() -> bytes:
        async with listening(request_seconds=0.2) as (service, port):
            found = await answer_to(port, request({**LONG, "stream": stream}, Connection="close"))
            await until(lambda: not llm.engine.busy, AT_ONCE_S)
            assert metric(service, "foreword:aborts_total") == 1
            return found

    found = asyncio.run(ask())
    assert b'"code":"request_timeout"' in found.replace(b": ", b":") and b"[DONE]" not in found
    assert found.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 504 ")
    assert (b'\ndata: {"error":{"message":' in found) is stream


@pytest.mark.usefixtures("slow")
def test_a_server_that_drains(listening: Any, llm: LLM, until: Any) -> None:
    """Short requests finish; a long one ends with an error in its stream; a new one is refused."""

    async def ask() -> tuple[bytes, bytes, bytes]:
        async with listening() as (service, port):
            short = asyncio.create_task(answer_to(port, request({**LONG, "max_tokens": 4}, Connection="close")))
            long = asyncio.create_task(answer_to(port, request({**LONG, "stream": True}, Connection="close")))
            await until(lambda: len(llm.engine.slots.running) == 2)
            draining = asyncio.create_task(service.admission.drain(1.0))
            await until(lambda: service.admission.state == "draining")
            new = await answer_to(port, request(LONG, Connection="close"))
            await draining
            assert not service.admission.inside
            return await short, await long, new

    short, long, new = asyncio.run(ask())
    assert short.startswith(b"HTTP/1.1 200 ") and b'"finish_reason": "length"' in short
    assert b'"code":"draining"' in long and b"[DONE]" not in long
    assert new.startswith(b"HTTP/1.1 503 ") and b"retry-after" in new.lower()
    assert not llm.engine.busy


@pytest.mark.usefixtures("slow")
def test_a_stream_without_news_stays_alive(listening: Any, llm: LLM, until: Any) -> None:
    """Comments come while a request waits for a slot, and its text is whole."""

    async def ask() -> bytes:
        async with listening(keep_alive_seconds=0.05) as (service, port):
            holding = [asyncio.create_task(answer_to(port, request({**LONG, "max_tokens": 30}))) for _ in range(2)]
            await until(lambda: len(llm.engine.slots.running) == 2)
            found = await answer_to(port, request({**LONG, "max_tokens": 3, "stream": True}, Connection="close"))
            for task in holding:
                task.cancel()
            await asyncio.gather(*holding, return_exceptions=True)
            return found

    found = asyncio.run(ask())
    assert found.count(b": keep-alive\n\n") >= 2 and b'"finish_reason":"length"' in found and b"[DONE]" in found


def test_a_step_that_breaks_is_told_in_the_stream(listening: Any, llm: LLM, monkeypatch: Any) -> None:
    """And the server serves the next request."""

    async def ask() -> tuple[bytes, bytes, bytes]:
        async with listening() as (_, port):
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "advance", lambda *_: 1 // 0)
                stream = await answer_to(port, request({**LONG, "stream": True}, Connection="close"))
                whole = await answer_to(port, request(LONG, Connection="close"))
            return stream, whole, await answer_to(port, request({**LONG, "max_tokens": 2}, Connection="close"))

    stream, whole, after = asyncio.run(ask())
    assert b'"code":"internal_error"' in stream and b"division" not in stream and b"[DONE]" not in stream
    assert whole.startswith(b"HTTP/1.1 500 ") and b"division" not in whole
    assert after.startswith(b"HTTP/1.1 200 ")


MALFORMED = {
    "a size that is no number": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a size that is negative": b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    "a chunk that is longer": b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}}}}}\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
    "a length that is no number": b"Content-Length: x\r\n\r\n{}",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_bodies_that_are_no_http(listening: Any, sent: bytes) -> None:
    async def ask() -> tuple[bytes, bytes]:
        async with listening() as (_, port):
            head = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n".encode()
            found = b""
            with suppress(ConnectionError):
                found = await asyncio.wait_for(answer_to(port, head + sent), AT_ONCE_S)
            return found, await answer_to(port, request({**LONG, "max_tokens": 2}, Connection="close"))

    found, after = asyncio.run(ask())
    assert found == b"" or found.startswith(b"HTTP/1.1 400 ")
    assert after.startswith(b"HTTP/1.1 200 ")


def test_a_body_that_stops_half_way(listening: Any, until: Any) -> None:
    """The client leaves before its body is whole: nothing was let in."""

    async def ask() -> None:
        async with listening() as (service, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(LONG)[:-5])
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()
            after = await answer_to(port, request({**LONG, "max_tokens": 2}, Connection="close"))
            assert after.startswith(b"HTTP/1.1 200 ") and not service.admission.inside

    asyncio.run(ask())


def test_a_slow_reader_gets_the_whole_text(listening: Any, llm: LLM) -> None:
    """The engine does not wait for it, and rounds that were decided meanwhile come together."""

    async def ask() -> bytes:
        async with listening() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
            writer.write(request({**LONG, "stream": True, "temperature": 0, "max_tokens": 60}, Connection="close"))
            found = b""
            while part := await reader.read(300):
                found += part
                await asyncio.sleep(0.001)
            writer.close()
            return found

    found = asyncio.run(ask()).decode()
    chunks = [json.loads(line) for line in re.findall(r"^data: ({.*})\r?$", found, re.MULTILINE)]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == llm.generate(LONG["messages"], ignore_eos=True, temperature=0, max_new_tokens=60).text


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", request(LONG)[:40], request({}, Connection="keep-alive") + b"GET /"]
)
def test_a_head_that_never_ends(listening: Any, monkeypatch: Any, sent: bytes) -> None:
    """Nothing, a part of the first line, of the headers, or of a second request: the connection is closed."""

    async def ask() -> bytes:
        async with listening() as (_, port):
            return await asyncio.wait_for(answer_to(port, sent), AT_ONCE_S)

    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    assert asyncio.run(ask())[:13] == (b"HTTP/1.1 400 " if sent.endswith(b"GET /") else b"")


def test_a_body_that_never_ends(listening: Any, monkeypatch: Any) -> None:
    """The time of heads does not count for it."""

    async def ask() -> bytes:
        async with listening() as (_, port):
            return await asyncio.wait_for(answer_to(port, request(LONG)[:-5]), AT_ONCE_S)

    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    monkeypatch.setattr(generation, "BODY_S", 0.3)
    assert asyncio.run(ask()).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_reads_nothing_cannot_keep_its_request(monkeypatch: Any) -> None:
    """A write that waits for it ends soon after the request has been ended; one that does not wait goes through."""

    async def wait() -> Any:
        await asyncio.Event().wait()

    async def pass_on() -> None:
        pass

    async def write() -> None:
        async with Flow(wait, seconds=0.05) as flow:
            with pytest.raises(ClientGone):
                await flow.written(wait())
            await flow.written(pass_on())
            with pytest.raises(ClientGone):
                await flow.written(wait())

    monkeypatch.setattr(flow_module, "LAST_WRITE_S", 0.05)
    asyncio.run(asyncio.wait_for(write(), AT_ONCE_S))
