"""OpenAI's own client against a server on a real port: what it parses, what it sends, and what it raises."""

import asyncio
import time
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.serve.options import digest

SAY: list[Any] = [{"role": "user", "content": "hello"}]
MANNER: dict[str, Any] = {"temperature": 0.8, "seed": 4}
CHAT: dict[str, Any] = {"model": "llama", "messages": SAY}
ENDLESS: dict[str, Any] = {**CHAT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


def client_of(port: int, key: str = "key", retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=retries)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rounds last long enough to be interrupted."""
    advance = Engine.advance
    monkeypatch.setattr(Engine, "advance", lambda engine, rounds=1: time.sleep(0.02) or advance(engine, rounds))


def content(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


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
    assert whole.choices[0].message.content == content(chunks) == result.text
    assert len(whole.choices[0].logprobs.content) == len(result.tokens)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 10
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_the_client_without_an_event_loop(listening: Any, llm: LLM) -> None:
    def ask(port: int) -> Any:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**CHAT, max_tokens=10, **MANNER)
            return whole, list(client.chat.completions.create(**CHAT, max_tokens=10, stream=True, **MANNER))

    async def serve() -> Any:
        async with listening() as (_, port):
            return await asyncio.to_thread(ask, port)

    whole, chunks = asyncio.run(serve())
    result = llm.generate(SAY, max_new_tokens=10, **MANNER)
    assert whole.choices[0].message.content == content(chunks) == result.text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == result.finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"


@pytest.mark.parametrize("streams", [False, True])
def test_several_outputs_with_logprobs(listening: Any, llm: LLM, streams: bool) -> None:
    """The bytes of the tokens are those of the text, and each output has its own."""
    given: dict[str, Any] = {**CHAT, "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2, **MANNER}

    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            if not streams:
                answer = await client.chat.completions.create(**given)
                return [(one.message.content, one.logprobs.content) for one in answer.choices]
            chunks = [chunk async for chunk in await client.chat.completions.create(**given, stream=True)]
            choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
            entries: list[list[Any]] = [
                [entry for choice in choices if choice.index == index for entry in choice.logprobs.content]
                for index in (0, 1)
            ]
            return [(content(chunks, index), entries[index]) for index in (0, 1)]

    expected = llm.generate(SAY, max_new_tokens=8, n=2, logprobs=2, **MANNER)
    assert expected[0].tokens != expected[1].tokens
    for (text, entries), result in zip(asyncio.run(ask()), expected, strict=True):
        assert text == result.text
        assert [entry.token for entry in entries] == [one.text for one in result.logprobs]
        assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in result.logprobs], abs=1e-4)
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        written = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
        assert written == llm.tokenizer.decode(result.tokens, False)  # special tokens too


def test_the_stream_helper(listening: Any, llm: LLM) -> None:
    """It joins chunks itself, and is strict about their order."""
    stop = llm.generate(SAY, max_new_tokens=10, **MANNER).text[4]

    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            async with client.chat.completions.stream(**CHAT, max_tokens=10, stop=[stop, "never"], **MANNER) as stream:
                return [event async for event in stream], await stream.get_final_completion()

    events, final = asyncio.run(ask())
    text = llm.generate(SAY, max_new_tokens=10, stop=stop, **MANNER).text
    assert final.choices[0].message.content == text and final.choices[0].finish_reason == "stop"
    assert "".join(event.delta for event in events if event.type == "content.delta") == text


def test_fields_of_ours(listening: Any) -> None:
    """They go in `extra_body`, and what answers tell besides OpenAI's fields is kept by the client."""
    given: dict[str, Any] = {**CHAT, "max_tokens": 12, "temperature": 0}

    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            drafted = await client.chat.completions.create(**given)
            alone = await client.chat.completions.create(**given, extra_body={"speculate": False})
            likeliest = await client.chat.completions.create(**given | MANNER, extra_body={"top_k": 1})
            stream = await client.chat.completions.create(**given, stream=True, extra_body={"trace_rounds": True})
            return drafted, alone, likeliest, [chunk async for chunk in stream]

    drafted, alone, likeliest, chunks = asyncio.run(ask())
    answers = [one.choices[0].message.content for one in (drafted, alone, likeliest)]
    assert answers == [content(chunks)] * 3
    assert alone.foreword["drafted"] == 0 and alone.foreword["tokens_per_round"] == 1
    rounds = [chunk.foreword for chunk in chunks if "foreword" in chunk.model_extra]
    assert len(rounds) == drafted.foreword["rounds"]
    assert sum(len(one["tokens"]) for one in rounds) == drafted.usage.completion_tokens
    assert all(one["round"]["nodes"][0]["origin"] == "root" for one in rounds)


def test_predicted_outputs(listening: Any, llm: LLM) -> None:
    """What is right of a prediction is accepted, and the output is the same without it."""
    given: dict[str, Any] = {**CHAT, "max_tokens": 24, "temperature": 0}
    text = llm.generate(SAY, max_new_tokens=24, temperature=0).text

    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            return [
                await client.chat.completions.create(**given, prediction={"type": "content", "content": told})
                for told in (text, "something else entirely")
            ]

    right, wrong = asyncio.run(ask())
    assert right.choices[0].message.content == wrong.choices[0].message.content == text
    right, wrong = (one.usage.completion_tokens_details for one in (right, wrong))
    assert right.accepted_prediction_tokens > 0
    predicted = len(llm.tokenizer.encode(text, chat=False))
    assert right.accepted_prediction_tokens + right.rejected_prediction_tokens == predicted
    assert wrong.rejected_prediction_tokens > 0


def test_completions(listening: Any, llm: LLM) -> None:
    given: dict[str, Any] = {"model": "llama", "prompt": ["a", "b"], "max_tokens": 5, **MANNER}

    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            whole = await client.completions.create(**given, logprobs=1)
            stream = await client.completions.create(**given, stream=True, stream_options={"include_usage": True})
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    expected = llm.generate(["a", "b"], chat=False, max_new_tokens=5, **MANNER)
    streamed = [
        "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index) for index in (0, 1)
    ]
    assert [choice.text for choice in whole.choices] == streamed == [one.text for one in expected]
    assert [len(choice.logprobs.token_logprobs) for choice in whole.choices] == [len(one.tokens) for one in expected]
    assert chunks[-1].usage.completion_tokens == sum(len(one.tokens) for one in expected)


def test_responses(listening: Any, llm: LLM) -> None:
    """In all ways that the client asks: whole, as a stream, and by its helper."""
    given: dict[str, Any] = {"model": "llama", "input": "hello", "max_output_tokens": 10, "temperature": 0}

    async def ask() -> Any:
        async with listening() as (_, port), client_of(port) as client:
            whole = await client.responses.create(**given, include=["message.output_text.logprobs"])
            streamed = [event async for event in await client.responses.create(**given, stream=True)]
            async with client.responses.stream(**given) as stream:
                helped = [event async for event in stream]
            return whole, streamed, helped

    whole, *streams = asyncio.run(ask())
    result = llm.generate(SAY, max_new_tokens=10, temperature=0)
    assert whole.output_text == result.text
    assert len(whole.output[0].content[0].logprobs) == len(result.tokens) == whole.usage.output_tokens
    for events in streams:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == result.text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.output_text == result.text
        assert events[-1].response.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.usefixtures("slow")
def test_closing_a_stream_frees_its_slot(listening: Any, llm: LLM, until: Any) -> None:
    async def ask() -> Any:
        async with listening() as (service, port), client_of(port) as client:
            stream = await client.chat.completions.create(**ENDLESS, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            busy = service.metrics.text().decode()
            await stream.close()
            await until(lambda: not llm.engine.slots.running)
            await until(lambda: service.admission.inside == 0)
            return busy, service.metrics.text().decode()

    busy, idle = asyncio.run(ask())
    assert 'foreword:requests_running{model_name="llama"} 1.0' in busy
    assert 'foreword:requests_running{model_name="llama"} 0.0' in idle
    assert 'foreword:aborts_total{model_name="llama",reason="client"} 1.0' in idle


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
                with pytest.raises(openai.AuthenticationError) as unknown:
                    await client.models.list()
                assert unknown.value.code == "invalid_api_key"
            async with client_of(port) as client:
                with pytest.raises(openai.NotFoundError) as other:
                    await client.chat.completions.create(model="other", messages=SAY)
                assert (other.value.param, other.value.code) == ("model", "model_not_found")
                with pytest.raises(openai.NotFoundError):
                    await client.embeddings.create(model="llama", input="hello")
                with pytest.raises(openai.BadRequestError) as cold:
                    await client.chat.completions.create(**CHAT, temperature=-1)
                assert cold.value.param == "temperature" and cold.value.type == "invalid_request_error"
                with pytest.raises(openai.BadRequestError) as spoken:
                    await client.chat.completions.create(**CHAT, modalities=["text", "audio"])
                assert (spoken.value.param, spoken.value.code) == ("modalities", "unsupported_field")

    asyncio.run(ask())


@pytest.mark.usefixtures("slow")
def test_a_full_queue_is_a_rate_limit_and_is_tried_again(listening: Any, llm: LLM, until: Any) -> None:
    """The client waits as long as `Retry-After` says, and then its request is let in."""

    async def ask() -> Any:
        async with listening(max_queued=0) as (_, port), client_of(port) as client, client_of(port, retries=2) as patient:
            streams = [await client.chat.completions.create(**ENDLESS, stream=True) for _ in range(2)]
            await until(lambda: len(llm.engine.slots.running) == 2)
            with pytest.raises(openai.RateLimitError) as full:
                await client.chat.completions.create(**CHAT, max_tokens=2)
            assert full.value.code == "queue_full" and int(full.value.response.headers["retry-after"]) >= 1
            asked = asyncio.create_task(patient.chat.completions.create(**CHAT, max_tokens=2))
            await asyncio.sleep(0.3)  # long enough to be refused once
            assert not asked.done()
            for stream in streams:
                await stream.close()
            return await asked

    assert asyncio.run(ask()).usage.completion_tokens == 2


def test_an_error_in_a_stream_is_raised(listening: Any) -> None:
    async def ask() -> None:
        async with listening(request_seconds=0.05) as (_, port), client_of(port) as client:
            stream = await client.chat.completions.create(**CHAT, stream=True, extra_body={"ignore_eos": True})
            with pytest.raises(openai.APIError, match="took longer than 0.05 s"):
                async for _ in stream:
                    pass

    asyncio.run(ask())
