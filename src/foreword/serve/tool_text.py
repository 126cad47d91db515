"""The parts of an answer that need more than text: tool calls that are found in it, and formats that it must have.

Both come from modules that need packages of their own. Without them, requests that need them are refused by the name of the
field.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Protocol

from foreword.serve.errors import Refusal
from foreword.serve.fields import Object


class Parser(Protocol):
    """Finds tool calls in text that comes in pieces. `called`: it has found one."""

    called: bool

    def push(self, text: str) -> list[Object]:
        """Return the deltas that this text completes: {"content": ...} or {"tool_calls": [...]}."""

    def finish(self) -> list[Object]:
        """Return the deltas of what was held back, when no more text will come."""


class NoTools:
    """The parser of requests without tools."""

    called = False

    def push(self, text: str) -> list[Object]:
        return [{"content": text}] if text else []

    def finish(self) -> list[Object]:
        return []


class ToolPlan(Protocol):
    """How tools are shown to the model, and how its calls are found."""

    settings: Object

    def parser(self) -> Parser:
        """Return a new parser, for one output."""


def tool_plan(tools: list[Object], choice: str | Object | None, parallel: bool | None) -> ToolPlan:
    """Return the plan of a request with tools."""
    plan: ToolPlan = _part("tools", "tools").settings(tools, choice, parallel)
    return plan


def format_settings(response_format: Object) -> Object:
    """Return the settings of a `response_format`."""
    if response_format.get("type") == "text":
        return {}
    found: Object = _part("structured", "response_format").settings(response_format)
    return found


def _part(name: str, field: str) -> Any:
    try:
        return import_module(f"foreword.serve.{name}")
    except ImportError as error:
        message = f"{field} is not supported by this server, which lacks the package {error.name}"
        raise Refusal(400, message, param=field, code="unsupported_field") from error


def merged(deltas: Iterable[Object]) -> Object:
    """Return the message that some deltas make up."""
    content, calls = "", dict[int, Object]()
    for delta in deltas:
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            found = calls.setdefault(call["index"], {"id": "", "type": "function", "function": {}})
            found["id"] = call.get("id") or found["id"]
            for name, text in call.get("function", {}).items():
                found["function"][name] = found["function"].get(name, "") + (text or "")
    tools = {"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {}
    return {"role": "assistant", "content": content or (None if calls else ""), "refusal": None, **tools}
