"""POST /v1/responses: items in, numbered events out, no state; and tool calls in both chat APIs."""

import asyncio
import re
import sys
from typing import Any

import pytest

from foreword.api import LLM
from foreword.serve import chat, responses
from foreword.serve.fields import ResponseFields
from foreword.serve.responses import messages_of

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
SAY = [{"role": "user", "content": "hello"}]
MANNER: dict[str, Any] = {"temperature": 0.8, "seed": 4}


def ask(serving: Any, path: str, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the whole answer, and the parsed events of a stream."""

    async def both() -> tuple[Any, list[Any]]:
        async with serving() as client:
            whole = await client.post(path, fields)
            assert whole.status_code == 200, whole.text
            return whole.json(), await client.chunks(path, **fields)

    return asyncio.run(both())


def test_text_streamed_and_whole(serving: Any, llm: LLM) -> None:
    whole, events = ask(serving, RESPONSES, input="hello", max_output_tokens=12, **MANNER)
    result = llm.generate(SAY, max_new_tokens=12, **MANNER)
    (item,) = whole["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == result.text
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 12 and whole["store"] is False and whole["foreword"]["rounds"] >= 1
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == result.text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    order = [event["type"].removeprefix("response.") for event in events]
    named = re.sub(r"( output_text.delta)+", " deltas", " ".join(order))
    assert named == (
        "created in_progress output_item.added content_part.added deltas output_text.done content_part.done "
        "output_item.done incomplete"
    )
    last = events[-1]["response"]
    assert last["output"][0]["content"] == item["content"] and last["output"][0]["status"] == "incomplete"
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert added["item"]["content"] == []


def test_log_probabilities(serving: Any, llm: LLM) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 9}
    whole, events = ask(serving, RESPONSES, input="hello", **fields, **MANNER)
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 9 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    streamed = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "summary": []},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
    ]
    called = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for name in ("c1", "c2")
    ]
    assert messages_of(ResponseFields(input=items, instructions="be brief")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
    ]


# Tool calls ---------------------------------------------------------------------------------------------------------------


class LastCharacterCalls:
    """A parser that makes a call of every second character, as the plan of a request with tools."""

    settings: dict[str, Any] = {"skip_special_tokens": False}

    def __init__(self) -> None:
        self.called, self.count = False, 0

    def parser(self) -> "LastCharacterCalls":
        return LastCharacterCalls()

    def push(self, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for character in text:
            self.count += 1
            if self.count % 2:
                deltas.append({"content": character})
                continue
            self.called, place = True, self.count // 2 - 1
            head = {"index": place, "id": f"call_{place}", "type": "function"}
            deltas.append({"tool_calls": [{**head, "function": {"name": "say", "arguments": ""}}]})
            deltas.append({"tool_calls": [{"index": place, "function": {"arguments": character}}]})
        return deltas

    def finish(self) -> list[dict[str, Any]]:
        return [{"content": "."}]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the plan of tools was made of."""
    found: list[Any] = []

    def plan(tokenizer: Any, *asked: Any) -> LastCharacterCalls:
        found.append(asked)
        return LastCharacterCalls()

    for module in (chat, responses):
        monkeypatch.setattr(module, "tool_plan", plan)
    return found


FUNCTION = {"name": "say", "parameters": {"type": "object"}}


def test_tool_calls_of_a_chat(serving: Any, llm: LLM, given: list[Any]) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    fields = {"messages": SAY, "tools": tools, "tool_choice": "auto", "parallel_tool_calls": True, "stop": "zz"}
    text = llm.generate(SAY, max_new_tokens=9, skip_special_tokens=False, **MANNER).text
    whole, chunks = ask(serving, CHAT, max_tokens=9, **fields, **MANNER)
    assert given == [(tools, "auto", True, {})] * 2
    message = whole["choices"][0]["message"]
    assert message["content"] == text[::2] + "."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "say", "arguments": one} for one in text[1::2]]
    assert whole["choices"][0]["finish_reason"] == "length"  # not ended by a call
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    parts = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in parts) == text[1::2]


def test_tool_calls_of_a_response(serving: Any, llm: LLM, given: list[Any]) -> None:
    text = llm.generate(SAY, max_new_tokens=5, skip_special_tokens=False, **MANNER).text
    choice = {"type": "function", "name": "say"}
    fields = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": choice, "max_output_tokens": 5}
    whole, events = ask(serving, RESPONSES, input="hello", **fields, **MANNER)
    assert given[0] == (
        [{"type": "function", "function": FUNCTION}],
        {"type": "function", "function": {"name": "say"}},
        None,
        {},
    )
    for output in (whole["output"], events[-1]["response"]["output"]):
        kinds = [item["type"] for item in output]
        assert kinds == ["message", "function_call"] * (len(text) // 2) + ["message"]
        assert [item["arguments"] for item in output if item["type"] == "function_call"] == [*text[1::2]]
        assert [item["status"] for item in output] == ["completed"] * (len(output) - 1) + ["incomplete"]
    places = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert places == list(range(len(whole["output"])))
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == [*text[1::2]]


def test_a_call_that_ends_an_output(serving: Any, llm: LLM, given: list[Any]) -> None:
    stop = llm.generate(SAY, max_new_tokens=9, skip_special_tokens=False, **MANNER).text[4]
    fields = {"messages": SAY, "tools": [{"type": "function", "function": FUNCTION}], "stop": stop}
    whole, chunks = ask(serving, CHAT, max_tokens=9, **fields, **MANNER)
    assert whole["choices"][0]["finish_reason"] == chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("path", "field"), [(CHAT, "response_format"), (RESPONSES, "text")])
def test_without_xgrammar_formats_are_refused_by_name(serving: Any, monkeypatch: Any, path: str, field: str) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    wanted: dict[str, Any] = {"type": "json_object"}

    async def refusal() -> Any:
        async with serving() as client:
            given = {"messages": SAY, "input": "x", field: wanted if path == CHAT else {"format": wanted}}
            return await client.error(path, given)

    status, error = asyncio.run(refusal())
    assert status == 400 and error["param"] == field and "pip install 'foreword[json]'" in error["message"]
