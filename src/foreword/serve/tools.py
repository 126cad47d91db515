"""Tools that a model may call: fields of a request -> settings of `generate`, and the parser of its outputs.

The chat template shows the tools to the model. A grammar makes the model call where it must: with `tool_choice` "required"
or the name of a tool, and where a tool is `strict`. Otherwise the output is free, and the parser finds the calls in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreword.serve.errors import Refusal
from foreword.serve.fields import Object
from foreword.serve.structured import as_part
from foreword.serve.tool_formats import ToolFormat, format_of
from foreword.serve.tool_text import CallParser, NoTools, Parser
from foreword.text import Tokenizer

LONGEST_NAME = 256  # characters
NO_PARAMETERS: Object = {"type": "object", "properties": {}}
FUNCTION = '{"type": "function", "function": {"name": ...}}'
CHOICES = f'"none", "auto", "required", {FUNCTION} or {{"type": "allowed_tools", "allowed_tools": {{...}}}}'


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Object | None
    strict: bool

    def shown(self) -> Object:
        """Return it as the chat template reads it."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}


@dataclass(frozen=True)
class ToolChoice:
    """What `tool_choice` says. `names`: of the tools that may be called. `single`: exactly one call."""

    must_call: bool
    names: frozenset[str]
    single: bool = False


@dataclass(frozen=True)
class ToolPlan:
    """How tools are shown to the model, and how its calls are found. `form`: None if it may call none."""

    settings: Object
    form: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    most: int | None = None

    def parser(self) -> Parser:
        """Return a new parser, for one output."""
        return NoTools() if self.form is None else CallParser(self.form, self.names, self.most)


def tool_plan(
    tokenizer: Tokenizer,
    given: list[Object] | None,
    tool_choice: str | Object | None,
    parallel: bool | None,
    answer: Object,
) -> ToolPlan:
    """Return the plan of a request. `answer`: the setting for the format of an output without calls, if it has one."""
    tools = tools_of(given or [])
    choice = _choice(tool_choice, frozenset(tool.name for tool in tools))
    tools = [tool for tool in tools if tool.name in choice.names]
    if not tools:
        return ToolPlan(answer)
    form = format_of(tokenizer.tool_template)
    is_single = choice.single or parallel is False
    settings = {"tools": [tool.shown() for tool in tools], **_grammar(form, tools, choice.must_call, is_single, answer)}
    if tokenizer.hides(form.prefix):
        settings["skip_special_tokens"] = False
    return ToolPlan(settings, form, choice.names, 1 if is_single else None)


def _grammar(form: ToolFormat, tools: list[Tool], must_call: bool, is_single: bool, answer: Object) -> Object:
    """Return the setting for the grammar of an output: calls alone, an answer or calls, or free text with calls."""
    if not (must_call or answer or any(tool.strict for tool in tools)):
        return {}
    tags = [form.tag(tool.name, tool.parameters or NO_PARAMETERS) for tool in tools]
    first_only = is_single or form.separator is None
    calls = {"tags": tags, "stop_after_first": first_only, "at_least_one": must_call or bool(answer)}
    only_calls = {"type": "tags_with_separator", "separator": form.separator or "", **calls}
    if must_call:
        part = only_calls
    elif answer:
        part = {"type": "or", "elements": [as_part(answer), only_calls]}
    else:
        part = {"type": "triggered_tags", "triggers": [form.trigger], **calls}
    return {"structural_tag": {"type": "structural_tag", "format": part}}


def tools_of(given: list[Object]) -> list[Tool]:
    """Return the tools of a field, checked."""
    tools = [_tool(place, one) for place, one in enumerate(given)]
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise _refused(f"two tools are called {tool.name!r}; give them different names")
        seen.add(tool.name)
    return tools


def _tool(place: int, given: Object) -> Tool:
    where = f"tools[{place}]"
    if given.get("type") != "function":
        raise _refused(f"{where} must be of type function; this server knows no other tools")
    function = given.get("function")
    if not isinstance(function, dict):
        raise _refused(f"{where} must have a function, an object with its name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
        raise _refused(f"{where} needs a name of 1 to {LONGEST_NAME} characters")
    wrong = [
        key for key, kind in (("description", str), ("parameters", dict), ("strict", bool)) if _differs(function, key, kind)
    ]
    if wrong:
        raise _refused(
            f"{where} has {wrong[0]} of a wrong type; description is a string, parameters a JSON schema as an object"
        )
    return Tool(name, function.get("description"), function.get("parameters"), function.get("strict") is True)


def _differs(given: Object, key: str, kind: type) -> bool:
    return given.get(key) is not None and not isinstance(given[key], kind)


def _choice(given: str | Object | None, names: frozenset[str]) -> ToolChoice:
    """Return what a `tool_choice` says of the tools with these names."""
    if given is None or given == "auto":
        return ToolChoice(False, names)
    if given == "none":
        return ToolChoice(False, frozenset())
    if given == "required" and names:
        return ToolChoice(True, names)
    if isinstance(given, dict) and given.get("type") == "function":
        return ToolChoice(True, frozenset([_name(given, names)]), single=True)
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return _allowed(given.get("allowed_tools"), names)
    if given == "required":
        raise Refusal(400, "tool_choice is required, but no tools are given", param="tool_choice")
    raise Refusal(400, f"tool_choice must be {CHOICES}", param="tool_choice")


def _allowed(given: Any, names: frozenset[str]) -> ToolChoice:
    tools = given.get("tools") if isinstance(given, dict) else None
    if not isinstance(tools, list) or not tools or given.get("mode") not in ("auto", "required"):
        message = f'tool_choice.allowed_tools must have a mode, "auto" or "required", and tools, a list of {FUNCTION}'
        raise Refusal(400, message, param="tool_choice")
    return ToolChoice(given["mode"] == "required", frozenset(_name(tool, names) for tool in tools))


def _name(given: Any, names: frozenset[str]) -> str:
    """Return the name in a reference to a tool."""
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        found = f"{name[:LONGEST_NAME]!r}, which is none of the tools" if isinstance(name, str) else "no tool"
        raise Refusal(400, f"tool_choice names {found}; name one as {FUNCTION}", param="tool_choice")
    return name


def _refused(message: str) -> Refusal:
    return Refusal(400, message, param="tools")
