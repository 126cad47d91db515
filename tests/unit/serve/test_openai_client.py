"""OpenAI's own client against a server on a real port: what it parses, and what it raises."""

import asyncio
from typing import Any

import openai
import pytest

from foreword.api import LLM
from foreword.serve.options import digest

SAY: list[Any] = [{"role": "user", "content": "hello"}]
MANNER: dict[str, Any] = {"temperature": 0.8, "seed": 4}


def client_of(port: int, key: str = "key") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def test_a_chat(listening: Any, llm: LLM) -> None:
    async def ask() -> Any:
        async with listening(key_digests=(digest("key"),)) as (_, port), client_of(port) as client:
            (model,) = (await client.models.list()).data
            given: dict[str, Any] = {
                "model": model.id,
                "messages": SAY,
                "max_completion_tokens": 10,
                "logprobs": True,
                **MANNER,
            }
            whole = await client.chat.completions.create(**given, top_logprobs=1, extra_body={"top_k": 40})
            stream = await client.chat.completions.create(
                **given, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 40}
            )
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    result = llm.generate(SAY, max_new_tokens=10, top_k=40, **MANNER)
    assert whole.choices[0].message.content == result.text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == result.text
    assert len(whole.choices[0].logprobs.content) == len(result.tokens)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 10
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_the_stream_helper(listening: Any, llm: LLM) -> None:
    """It joins chunks itself, and is strict about their order."""
    stop = llm.generate(SAY, max_new_tokens=10, **MANNER).text[4]

    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            given: dict[str, Any] = {"model": "llama", "messages": SAY, "max_tokens": 10, "stop": stop, **MANNER}
            async with client.chat.completions.stream(**given) as stream:
                return [event async for event in stream], await stream.get_final_completion()

    events, final = asyncio.run(ask())
    text = llm.generate(SAY, max_new_tokens=10, stop=stop, **MANNER).text
    assert final.choices[0].message.content == text and final.choices[0].finish_reason == "stop"
    assert "".join(event.delta for event in events if event.type == "content.delta") == text


def test_completions_and_responses(listening: Any, llm: LLM) -> None:
    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            text = await client.completions.create(model="llama", prompt=["a", "b"], max_tokens=5, **MANNER)
            response = await client.responses.create(model="llama", input="hello", max_output_tokens=10, temperature=0)
            async with client.responses.stream(model="llama", input="hello", max_output_tokens=10, temperature=0) as stream:
                events = [event async for event in stream]
            return text, response, events

    text, response, events = asyncio.run(ask())
    expected = llm.generate(["a", "b"], chat=False, max_new_tokens=5, **MANNER)
    assert [choice.text for choice in text.choices] == [one.text for one in expected]
    result = llm.generate(SAY, max_new_tokens=10, temperature=0)
    assert response.output_text == result.text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == result.text


def test_errors_are_those_that_the_client_knows(listening: Any) -> None:
    async def ask() -> None:
        async with listening(key_digests=(digest("key"),)) as (_, port):
            async with client_of(port, "wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            async with client_of(port) as client:
                with pytest.raises(openai.NotFoundError):
                    await client.chat.completions.create(model="other", messages=SAY)
                with pytest.raises(openai.BadRequestError) as refusal:
                    await client.chat.completions.create(model="llama", messages=SAY, temperature=-1)
                assert refusal.value.param == "temperature"

    asyncio.run(ask())


def test_an_error_in_a_stream_is_raised(listening: Any) -> None:
    async def ask() -> None:
        async with listening(request_seconds=0.05) as (_, port), client_of(port) as client:
            stream = await client.chat.completions.create(
                model="llama", messages=SAY, stream=True, extra_body={"ignore_eos": True}
            )
            with pytest.raises(openai.APIError, match="took longer than 0.05 s"):
                async for _ in stream:
                    pass

    asyncio.run(ask())
