"""POST /v1/responses, without state: input items -> messages, rounds -> the events and items of OpenAI's Responses API.

Nothing is stored: what needs an earlier response is refused. The answer has a message item with text, and an item for each
tool call. Events are numbered; the last one holds the whole response.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from foreword.engine.request import Running
from foreword.requests import Prompt
from foreword.serve import sse
from foreword.serve.errors import Refusal
from foreword.serve.exchange import length_limit
from foreword.serve.fields import STATELESS, Object, ResponseFields, settings_of
from foreword.serve.flow import News
from foreword.serve.logprobs import entries_of, of_chat
from foreword.serve.response_items import ItemWriter
from foreword.serve.service import Service
from foreword.serve.structured import format_settings
from foreword.serve.tools import tool_plan
from foreword.serve.usage import cost_of, usage_of

LOGPROBS = "message.output_text.logprobs"  # an entry of `include`


class ResponseExchange:
    """One request for a response."""

    samples = 1

    def __init__(self, service: Service, fields: ResponseFields, session: str | None) -> None:
        self._service, self._fields, self._session = service, fields, session
        self.prompts: list[Prompt] = [messages_of(fields)]
        self.streams = bool(fields.stream)
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._wants_logprobs = LOGPROBS in (fields.include or ()) or fields.top_logprobs is not None
        self._sent = 0  # events

    def settings(self) -> Object:
        fields = self._fields
        found = settings_of(fields, self._session)
        if self._wants_logprobs:
            found["logprobs"] = fields.top_logprobs or 0
        if fields.reasoning and fields.reasoning.get("effort") is not None:
            effort = {"reasoning_effort": fields.reasoning["effort"]}
            found["chat_template_kwargs"] = effort | found.get("chat_template_kwargs", {})
        self._plan = tool_plan(
            self._service.llm.tokenizer,
            list(map(_chat_tool, fields.tools or ())),
            _chat_choice(fields.tool_choice),
            fields.parallel_tool_calls,
            format_settings(fields, _chat_format(fields.text), "text.format"),
        )
        found = self._plan.settings | found
        context = self._service.llm.limits.context
        return length_limit(found, context, context)

    def begin(self, runs: list[Running]) -> None:
        (self._run,) = runs
        self._parser = self._plan.parser()
        self._items = ItemWriter()

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._frames([{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")])

    def chunk(self, news: News) -> bytes:
        text = "".join(event.text for event in news.events)
        logprobs = of_chat(self._service.llm.tokenizer, entries_of(news.events)) if self._wants_logprobs else []
        events = self._items.add(self._parser.push(text), logprobs)
        if news.ended:
            events += self._items.add(self._parser.finish(), []) + self._items.end(self._status())
        return self._frames(events)

    def closing(self) -> bytes:
        response = self._response(self._status())
        return self._frames([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, refusal: Refusal) -> bytes:
        error = refusal.content()["error"]
        return self._frames([{"type": "error", "error": error, **error} | {"type": "error"}])

    def whole(self) -> Object:
        logprobs = of_chat(self._service.llm.tokenizer, self._run.logprobs) if self._wants_logprobs else []
        self._items.add([*self._parser.push(self._run.text), *self._parser.finish()], logprobs)
        self._items.end(self._status())
        return self._response(self._status())

    def _frames(self, events: list[Object]) -> bytes:
        first, self._sent = self._sent, self._sent + len(events)
        return b"".join(sse.named({**event, "sequence_number": first + i}) for i, event in enumerate(events))

    def _status(self) -> str:
        return "incomplete" if self._run.finish_reason == "length" else "completed"

    def _response(self, status: str) -> Object:
        fields, sampling = self._fields, self._run.request.sampling
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        found: Object = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": self._service.names[0],
            "output": self._items.output,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": fields.reasoning,
            "store": False,
            "system_fingerprint": self._service.fingerprint,
            "temperature": sampling.temperature,
            "text": fields.text or {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if status == "in_progress":
            return found
        return found | {"usage": _usage(self._run)} | cost_of([self._run], self._service.llm.method)


def _usage(run: Running) -> Object:
    usage = usage_of([run], 1)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def messages_of(fields: ResponseFields) -> list[Object]:
    """Return the chat messages of a request: its instructions, and its input."""
    messages: list[Object] = [] if fields.instructions is None else [{"role": "system", "content": fields.instructions}]
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for item in fields.input:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({name: item.get(name) for name in ("role", "content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1].get("tool_calls"):  # calls that were made together are one message
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":  # what the model thought before is no part of its prompt
            why = STATELESS if kind == "item_reference" else "input items are messages and function calls"
            raise Refusal(
                400, f"input holds an item of type {str(kind)[:40]!r}: {why}", param="input", code="unsupported_field"
            )
    return messages


def _chat_tool(tool: Object) -> Object:
    """Return a tool of the Responses API as one of the chat API."""
    if tool.get("type") != "function":
        message = f"tools holds one of type {str(tool.get('type'))[:40]!r}; this server knows functions only"
        raise Refusal(400, message, param="tools", code="unsupported_field")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _chat_choice(choice: str | Object | None) -> str | Object | None:
    """Return a `tool_choice` of the Responses API as one of the chat API."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_chat_choice(tool) if isinstance(tool, dict) else tool for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def _chat_format(text: Object | None) -> Any:
    """Return `text.format` as a `response_format` of the chat API."""
    given = (text or {}).get("format")
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
    return given
