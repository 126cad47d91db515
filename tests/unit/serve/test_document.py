"""/openapi.json against a real server: answers and errors are those of the document, whatever is asked."""

import asyncio
from typing import Any

import msgspec
import pytest

from foreword.serve import answers
from foreword.serve.app import OPEN
from foreword.serve.options import digest
from fuzz_server import asked
from real_server import RealServer


def test_answers_are_those_of_the_document(real_server: RealServer) -> None:
    good, written = asked(real_server, examples=8, seed=1)
    assert good and "0 generated" not in written, written
    assert real_server.ask({"prompt": "hello", "max_tokens": 2}).status == 200
    assert not real_server.wrote("Traceback"), real_server.lines


def test_all_but_the_open_endpoints_are_documented_to_need_a_key(serving: Any) -> None:
    """And they do: each operation of the document is asked without one."""

    async def ask() -> None:
        async with serving(key_digests=(digest("key"),)) as client:
            document = (await client.http.get("/openapi.json", headers={"authorization": "Bearer key"})).json()
            assert document["security"] == [{"key": []}, {}]
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    answer = await client.http.request(method, path.replace("{model}", "x"))
                    is_open = operation.get("security") == []
                    assert is_open == (path in OPEN) == ("401" not in operation["responses"]), path
                    assert (answer.status_code == 401) is not is_open, path

    asyncio.run(ask())


SAY = {"messages": [{"role": "user", "content": "hello"}]}
TALKATIVE = {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True, "trace_rounds": True}
ASKED: list[tuple[str, Any, type[Any], type[Any]]] = [
    ("/v1/chat/completions", SAY, answers.ChatAnswer, answers.ChatChunk),
    ("/v1/chat/completions", SAY | TALKATIVE, answers.ChatAnswer, answers.ChatChunk),
    ("/v1/completions", {"prompt": "hello"}, answers.CompletionAnswer, answers.CompletionChunk),
    (
        "/v1/completions",
        {"prompt": "hello", "logprobs": 2, "echo": True, "n": 2},
        answers.CompletionAnswer,
        answers.CompletionChunk,
    ),
    ("/v1/responses", {"input": "hello", "top_logprobs": 2}, answers.ResponseAnswer, answers.ResponseEvent),
]


@pytest.mark.parametrize(("path", "body", "whole", "event"), ASKED)
def test_answers_and_events_have_the_fields_of_the_document(
    serving: Any, path: str, body: Any, whole: type[Any], event: type[Any]
) -> None:
    """And no others, except in responses, which repeat fields of the request."""

    async def ask() -> tuple[Any, list[Any]]:
        async with serving() as client:
            length = {"max_output_tokens" if "responses" in path else "max_tokens": 3}
            options = {} if "responses" in path else {"stream_options": {"include_usage": True}}
            answer = await client.post(path, {**body, **length})
            return answer.json(), await client.chunks(path, **body, **length, **options)

    answer, chunks = asyncio.run(ask())
    events = [chunk for chunk in chunks if chunk != "data: [DONE]"]
    for given, kind in [(answer, whole), *((one, event) for one in events)]:
        read = msgspec.to_builtins(msgspec.convert(given, kind))
        assert "responses" in path or undocumented(given, read) == set()


def undocumented(given: Any, read: Any) -> set[str]:
    """Return the names of an answer that the structs do not have."""
    if isinstance(given, list):
        return {name for one, other in zip(given, read, strict=True) for name in undocumented(one, other)}
    if not isinstance(given, dict):
        return set()
    inner = {name for key in given.keys() & read.keys() for name in undocumented(given[key], read[key])}
    return (given.keys() - read.keys()) | inner
