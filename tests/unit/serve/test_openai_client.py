"""OpenAI's own client against a server on a real port: what it parses, and what it raises."""

import asyncio
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

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


class Paint(BaseModel):
    """What the model is asked for."""

    colour: Literal["red", "green"]
    count: Annotated[int, Field(ge=0, le=99)]
    note: Annotated[str, Field(pattern="^[a-z ]{0,4}$")]


PAINT: Any = {"type": "function", "function": {"name": "paint", "parameters": Paint.model_json_schema()}}


def test_a_chat_parses_into_a_model_of_pydantic(listening: Any, calling: LLM) -> None:
    """The client makes a strict JSON schema of it, and reads the answer with it."""

    async def ask() -> Any:
        async with listening(calling) as (_, port), client_of(port) as client:
            given: dict[str, Any] = {"model": "llama", "messages": SAY, "max_tokens": 400, **MANNER}
            chat = await client.chat.completions.parse(**given, response_format=Paint)
            response = await client.responses.parse(
                model="llama", input="hello", text_format=Paint, max_output_tokens=400, temperature=0
            )
            return chat.choices[0].message.parsed, response.output_parsed

    found = asyncio.run(ask())
    assert all(isinstance(one, Paint) and 0 <= one.count <= 99 and len(one.note) <= 4 for one in found)


def test_tools_streamed_and_whole(listening: Any, calling: LLM) -> None:
    """The stream helper joins the pieces of a call, and parses its arguments."""
    tool = openai.pydantic_function_tool(Paint, name="paint")
    given: dict[str, Any] = {"model": "llama", "messages": SAY, "tools": [tool], "tool_choice": "required"}
    given |= {"max_tokens": 400, "parallel_tool_calls": False, **MANNER}

    async def ask() -> Any:
        async with listening(calling) as (_, port), client_of(port) as client:
            whole = await client.chat.completions.create(**given)
            async with client.chat.completions.stream(**given) as stream:
                events = [event async for event in stream]
                return whole, events, await stream.get_final_completion()

    whole, events, final = asyncio.run(ask())
    for choice in (whole.choices[0], final.choices[0]):
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "paint"
        assert call.function.arguments == whole.choices[0].message.tool_calls[0].function.arguments
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(pieces) == call.function.arguments and len(pieces) > 3
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert isinstance(done.parsed_arguments, Paint) and done.name == "paint"


def test_a_conversation_with_a_tool(listening: Any, calling: LLM) -> None:
    """The client sends the call back as it came, with its result."""

    async def ask() -> Any:
        async with listening(calling) as (_, port), client_of(port) as client:
            given: dict[str, Any] = {"model": "llama", "tools": [PAINT], "max_tokens": 400, **MANNER}
            choice: Any = {"type": "function", "function": {"name": "paint"}}
            first = await client.chat.completions.create(**given, messages=SAY, tool_choice=choice)
            message = first.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "painted"}
            messages = [*SAY, message.model_dump(exclude_none=True), result]
            return message, await client.chat.completions.create(
                **given | {"max_tokens": 3}, messages=messages, extra_body={"return_token_ids": True}
            )

    message, second = asyncio.run(ask())
    Paint.model_validate_json(message.tool_calls[0].function.arguments)
    shown = calling.tokenizer.decode(second.prompt_token_ids)
    assert "<tool_call>" in shown and "painted" in shown and second.usage.completion_tokens == 3


def test_responses_with_tools(listening: Any, calling: LLM) -> None:
    flat: Any = {"type": "function", "name": "paint", "parameters": Paint.model_json_schema(), "strict": True}
    given: dict[str, Any] = {"model": "llama", "tools": [flat], "tool_choice": "required", "temperature": 0}
    given |= {"max_output_tokens": 400, "parallel_tool_calls": False}

    async def ask() -> Any:
        async with listening(calling) as (_, port), client_of(port) as client:
            async with client.responses.stream(**given, input="hello") as stream:
                events = [event async for event in stream]
            call = events[-1].response.output[0]
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}
            said: Any = {"role": "user", "content": "hello"}
            items = [said, call.model_dump(exclude_none=True, exclude={"parsed_arguments"}), result]
            return events, call, await client.responses.create(**given | {"tool_choice": "none"}, input=items)

    events, call, second = asyncio.run(ask())
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(pieces) == done.arguments == call.arguments and call.name == done.name == "paint"
    Paint.model_validate_json(call.arguments)
    assert second.output[0].type == "message"


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
