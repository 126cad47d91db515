"""A server in this process for a tiny model: an httpx client without a network, and a real port for what needs one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

import foreword
from doubles import Oracle, with_template
from foreword.api import LLM
from foreword.serve.app import app_of
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.connection import Connection
from foreword.serve.options import ServeOptions
from foreword.serve.server import listen
from foreword.serve.service import Service
from real_server import RealServer
from serve_faults import model_folder


@dataclass
class Client:
    """Asks an application directly. `service`: its parts."""

    http: httpx.AsyncClient
    service: Service

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await self.http.post(path, content=content, headers={"content-type": "application/json", **headers})

    async def chat(self, content: str = "hello", **fields: Any) -> Any:
        """Return the answer to a message."""
        answer = await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chunks(self, path: str, **fields: Any) -> list[Any]:
        """Return the chunks of a stream, [DONE] last."""
        answer = await self.post(path, {"stream": True, **fields})
        assert answer.status_code == 200, answer.text
        return chunks_of(answer.text)

    async def error(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the error of a refused request."""
        answer = await self.post(path, body, **headers)
        assert answer.headers["content-type"] == "application/json"
        return answer.status_code, answer.json()["error"]


def chunks_of(text: str) -> list[Any]:
    """Parse the events of a stream; comments are left out."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    lines = [line for event in events for line in event.split("\n") if line.startswith("data: ")]
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="session")
def joined() -> Callable[..., str]:
    """Gives the text of one choice of a stream of a chat or of completions."""

    def join(chunks: list[Any], index: int = 0) -> str:
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
        return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)

    return join


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """`foreword serve` with two slots, in processes of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREWORD_HOME", str(tmp_path_factory.mktemp("home")))
        with RealServer(model_folder(tmp_path_factory.mktemp("model"))) as server:
            yield server


@pytest.fixture(scope="module")
def llm(talking: Any, hf_tokenizer: Any, own_home: Any) -> Iterator[LLM]:
    """An LLM with two slots."""
    with foreword.wrap(talking("llama"), hf_tokenizer, "prompt_lookup", slots=2) as wrapped:
        yield wrapped


@pytest.fixture(scope="module")
def knowing(talking: Any, hf_tokenizer: Any, own_home: Any) -> Iterator[LLM]:
    """An LLM whose drafter knows the outputs that `expect` has seen, so that rounds decide several tokens."""
    with foreword.wrap(talking("llama"), hf_tokenizer, Oracle([], depth=5, lies=3), slots=2) as wrapped:
        yield wrapped


@pytest.fixture
def expect(knowing: LLM) -> Callable[..., Any]:
    """Gives what `generate` answers, and tells the drafter: expect(prompt, max_new_tokens=8)."""

    def generate(prompt: Any, **settings: Any) -> Any:
        results = knowing.generate(prompt, **settings)
        drafter = knowing.engine.drafter
        assert isinstance(drafter, Oracle)
        prefix = prompt if isinstance(prompt[0], int) else knowing.tokenizer.encode(prompt, settings.get("chat", True))
        drafter.sequences += [prefix + one.tokens for one in (results if isinstance(results, list) else [results])]
        return results

    return generate


@pytest.fixture
def listening(llm: LLM) -> Callable[..., AbstractAsyncContextManager[tuple[Service, int]]]:
    """Makes a server on a port of this machine, in the loop of the test: `async with listening() as (service, port)`."""

    @asynccontextmanager
    async def serve(other: LLM | None = None, **options: Any) -> AsyncIterator[tuple[Service, int]]:
        async with AsyncLLM.of(other or llm) as engine:
            app = app_of(engine, ServeOptions(**options))
            with listen("127.0.0.1", 0) as port:
                server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_config=None))
                running = asyncio.create_task(server.serve([port]))
                try:
                    yield app.state.service, port.getsockname()[1]
                finally:
                    server.should_exit = server.force_exit = True
                    await running

    return serve


async def until(is_true: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.002)


@pytest.fixture(scope="session", name="until")
def until_fixture() -> Any:
    """Waits until something is true."""
    return until


Serving = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def serving(llm: LLM) -> Serving:
    """Makes a server for the LLM, or for another one: `async with serving(max_queued=1) as client`."""

    @asynccontextmanager
    async def serve(other: LLM | None = None, **options: Any) -> AsyncIterator[Client]:
        async with AsyncLLM.of(other or llm) as engine:
            app = app_of(engine, ServeOptions(**options))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                yield Client(http, app.state.service)

    return serve


@pytest.fixture(scope="module")
def calling(talking: Any, hf_tokenizer: Any, own_home: Any) -> Iterator[LLM]:
    """An LLM as `knowing`, whose chat template shows tools."""
    model = talking("llama", max_position_embeddings=2048)
    with foreword.wrap(model, with_template(hf_tokenizer), Oracle([], depth=5, lies=3), slots=2) as wrapped:
        yield wrapped
