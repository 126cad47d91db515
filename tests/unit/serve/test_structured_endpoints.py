"""Formats and tools over HTTP, with a random model that grammars make write JSON: speculative output is plain output, a
stream is the whole answer, and messages with calls are shown to the model."""

import asyncio
import json
from typing import Any

import pytest

from doubles import Oracle
from foreword.api import LLM

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
SAY = [{"role": "user", "content": "hello"}]
COLOURS = ["red", "green", "blue"]
PROPERTIES = {
    "colour": {"enum": COLOURS},
    "count": {"type": "integer", "minimum": 0, "maximum": 99},
    "ok": {"type": "boolean"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "paint", "strict": True, "schema": SCHEMA}}
PAINT = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
MANNERS = [{"temperature": 0}, {"temperature": 1.0, "seed": 4}]
ASKED: dict[str, dict[str, Any]] = {
    "a schema": {"response_format": FORMAT},
    "rules": {"structured_outputs": {"choice": ["one", "two"]}},
    "a call": {"tools": [PAINT, NOW], "tool_choice": "required", "parallel_tool_calls": False},
    "a named tool": {"tools": [PAINT, NOW], "tool_choice": {"type": "function", "function": {"name": "paint"}}},
    "an answer or calls": {"tools": [PAINT], "response_format": FORMAT, "parallel_tool_calls": False},
}


def is_paint(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == PROPERTIES.keys() and found["colour"] in COLOURS and 0 <= found["count"] <= 99


@pytest.mark.parametrize("manner", MANNERS, ids=str)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_speculative_is_plain_and_streamed_is_whole(
    serving: Any, calling: LLM, asked: dict[str, Any], manner: dict[str, Any]
) -> None:
    given = {"messages": SAY, "max_tokens": 400, "return_token_ids": True, **asked, **manner}

    async def ask() -> Any:
        async with serving(calling) as client:
            plain = await client.chat(**given, speculate=False)
            drafter = calling.engine.drafter
            assert isinstance(drafter, Oracle)
            drafter.sequences.append(plain["prompt_token_ids"] + plain["choices"][0]["token_ids"])
            return plain, await client.chat(**given), await client.chunks(CHAT, **given)

    plain, whole, chunks = asyncio.run(ask())
    (choice,), (plainly,) = whole["choices"], plain["choices"]
    assert choice["token_ids"] == plainly["token_ids"] and choice["message"]["content"] == plainly["message"]["content"]
    assert whole["foreword"]["accepted"] > 0 == plain["foreword"]["accepted"]
    deltas = [one["choices"][0] for one in chunks[:-1]]
    streamed = [token for one in deltas for token in one.get("token_ids", [])]
    assert streamed == choice["token_ids"]
    assert "".join(one["delta"].get("content") or "" for one in deltas) == (choice["message"]["content"] or "")
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    calls = [functions_of(message) for message in (choice["message"], plainly["message"])]
    parts = [call for one in deltas for call in one["delta"].get("tool_calls", [])]
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert calls[0] == calls[1] and "".join(call["arguments"] for call in calls[0]) == arguments
    if "tools" not in asked or not calls[0]:
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop" and (text in ("one", "two") or is_paint(text))
    else:
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        ((name, text),) = ((call["name"], call["arguments"]) for call in calls[0])
        assert is_paint(text) if name == "paint" else json.loads(text) == {}


def functions_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


def test_a_call_after_text_that_the_model_was_free_to_write(serving: Any, calling: LLM) -> None:
    """The content comes first, then the call; the white space between them is neither's."""
    regex = r'so it is\n\n<tool_call>\n\{"name": "paint", "arguments": \{"a": "[a-z]{4}"\}\}\n</tool_call>\n'
    given = {"messages": SAY, "tools": [PAINT], "structured_outputs": {"regex": regex}, "max_tokens": 200}
    given |= {"logit_bias": {str(calling.tokenizer.piece_ids("<")[0]): -100}}  # else it may call at once

    async def ask() -> Any:
        async with serving(calling) as client:
            cut = await client.chat(**given | {"max_tokens": 70})
            return await client.chat(**given), await client.chunks(CHAT, **given), cut

    whole, chunks, cut = asyncio.run(ask())
    choice = whole["choices"][0]
    assert choice["message"]["content"] == "so it is" and choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_") and call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"]).keys() == {"a"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    (first, *rest) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "paint", "arguments": ""},
    }
    assert len(rest) > 3 and all(part.keys() == {"index", "function"} for part in rest)
    (begun,) = cut["choices"][0]["message"]["tool_calls"]
    assert cut["choices"][0]["finish_reason"] == "length"
    assert call["function"]["arguments"].startswith(begun["function"]["arguments"]) and begun["function"]["arguments"]


def test_calls_and_their_results_are_shown_to_the_model(serving: Any, calling: LLM) -> None:
    """In both chat APIs. The arguments come as the text of JSON, and reach the template as an object."""
    function = {"name": "paint", "arguments": '{"colour": "red"}'}
    messages = [
        *SAY,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    items = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]

    async def ask() -> Any:
        async with serving(calling) as client:
            chat = await client.chat(messages=messages, tools=[PAINT], max_tokens=1, return_token_ids=True)
            tool = {"type": "function", **PAINT["function"], "strict": False}  # type: ignore[dict-item]
            response = await client.post(RESPONSES, {"input": items, "tools": [tool], "max_output_tokens": 1})
            hidden = await client.chat(tools=[PAINT], tool_choice="none", max_tokens=1, return_token_ids=True)
            tokens = (await client.post("/tokenize", {"messages": messages, "tools": [PAINT]})).json()["tokens"]
            return chat, response.json(), hidden, tokens

    chat, response, hidden, tokens = asyncio.run(ask())
    assert tokens == chat["prompt_token_ids"]
    shown = calling.tokenizer.decode(chat["prompt_token_ids"], skip_special_tokens=False)
    assert shown.startswith(f"<tools>{json.dumps(PAINT)}</tools>")
    call = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
    assert shown.endswith(f"<|user|>hello<|assistant|>{call}<|tool|>done<|assistant|>")
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert "<tools>" not in calling.tokenizer.decode(hidden["prompt_token_ids"], skip_special_tokens=False)


def test_a_response_with_a_format_and_one_with_calls(serving: Any, calling: LLM) -> None:
    flat = {"type": "json_schema", "name": "paint", "schema": SCHEMA, "strict": True}
    tools = [{"type": "function", **one["function"], "strict": True} for one in (PAINT, NOW)]  # type: ignore[dict-item]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "paint"}]}

    async def ask() -> Any:
        async with serving(calling) as client:
            text = await client.post(RESPONSES, {"input": "hello", "text": {"format": flat}, "max_output_tokens": 400})
            called = {"input": "hello", "tools": tools, "tool_choice": allowed, "parallel_tool_calls": False}
            called |= {"max_output_tokens": 400, "temperature": 0}
            cut = await client.post(RESPONSES, called | {"max_output_tokens": 60})
            whole = await client.post(RESPONSES, called)
            return text.json(), whole.json(), await client.chunks(RESPONSES, **called), cut.json()

    text, whole, events, cut = asyncio.run(ask())
    assert is_paint(text["output"][0]["content"][0]["text"]) and text["status"] == "completed"
    (item,) = whole["output"]
    assert item["type"] == "function_call" and item["name"] == "paint" and is_paint(item["arguments"])
    assert item["status"] == "completed" and item["call_id"].startswith("call_")
    named = [event for event in events if "function_call_arguments" in event["type"]]
    assert len(named) > 2 and named[-1]["type"] == "response.function_call_arguments.done"
    assert "".join(event["delta"] for event in named[:-1]) == named[-1]["arguments"] == item["arguments"]
    assert {event["item_id"] for event in named} == {events[-1]["response"]["output"][0]["id"]}
    assert cut["status"] == "incomplete" and cut["output"][0]["status"] == "incomplete"


def test_a_completion_with_a_format(serving: Any, calling: LLM) -> None:
    async def ask() -> Any:
        async with serving(calling) as client:
            given: dict[str, Any] = {"prompt": "hello", "max_tokens": 400}
            formats: list[dict[str, Any]] = [
                {"response_format": FORMAT},
                {"guided_json": SCHEMA},
                {"guided_regex": "[ab]{3}"},
            ]
            return [(await client.post(COMPLETIONS, given | one)).json()["choices"][0] for one in formats]

    one, two, three = asyncio.run(ask())
    assert is_paint(one["text"]) and is_paint(two["text"]) and {*three["text"]} <= {*"ab"}
    assert {choice["finish_reason"] for choice in (one, two, three)} == {"stop"}


WRONG = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
WRONG_TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}
FLAT_TOOL = {"type": "function", "name": "now"}


@pytest.mark.parametrize(
    ("path", "given", "named", "message"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "type is one of"),
        (CHAT, {"response_format": WRONG}, "response_format", "json_schema cannot be used: Unsupported type"),
        (CHAT, {"guided_regex": "("}, "guided_regex", "regex cannot be used"),
        (CHAT, {"structured_outputs": {"grammar": "root ::= no"}}, "structured_outputs", "grammar cannot be used"),
        (CHAT, {"guided_regex": "a", "response_format": FORMAT}, "guided_regex", "give one of them"),
        (CHAT, {"tools": [{"type": "custom"}]}, "tools", "of type function"),
        (CHAT, {"tools": [PAINT], "tool_choice": "some"}, "tool_choice", "must be"),
        (CHAT, {"tools": [WRONG_TOOL], "tool_choice": "required"}, "tools", "structural_tag cannot be used"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text", "text.format must be an object"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "schema must be an object"),
        (RESPONSES, {"text": {"format": "text"}}, "text", "text.format must be an object"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text", "Unsupported type"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools", "'web_search'; this server knows functions only"),
        (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "names no tool"),
        (COMPLETIONS, {"response_format": WRONG | {"json_schema": 1}}, "response_format", "json_schema must be an object"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_by_the_field(
    serving: Any, calling: LLM, path: str, given: dict[str, Any], named: str, message: str
) -> None:
    body = {CHAT: {"messages": SAY}, RESPONSES: {"input": "hello"}, COMPLETIONS: {"prompt": "hello"}}[path]

    async def refusal() -> Any:
        async with serving(calling) as client:
            return await client.error(path, {**body, **given})

    status, error = asyncio.run(refusal())
    assert status == 400 and error["param"] == named and message in error["message"]


def test_a_template_without_tools_is_a_reason_to_refuse_them(serving: Any) -> None:
    async def refusal() -> Any:
        async with serving() as client:
            assert (await client.chat(tools=[PAINT], tool_choice="none", max_tokens=1))["choices"]
            return await client.error(CHAT, {"messages": SAY, "tools": [PAINT]})

    status, error = asyncio.run(refusal())
    assert status == 400 and error["param"] == "tools" and "does not show tools to the model" in error["message"]
