"""Tool calls in the text of an output: text in pieces of any size -> deltas of content and of calls.

A `CallParser` is a state machine over the text that it has not understood yet. Its steps run until nothing changes, so the
deltas, joined, do not depend on how the text was cut. Arguments are passed on as they come. Text that only looks like the
beginning of a call is content. White space next to calls is content only where it parts two texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from foreword.files import BadJSON, parse_json
from foreword.serve.fields import Object
from foreword.serve.tool_formats import ToolFormat
from foreword.text.stop import overlap

ARGUMENTS = ("arguments", "parameters")
HEAD = re.compile(rf'\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:{"|".join(ARGUMENTS)})"\s*:\s*(?=\{{)', re.DOTALL)
FIRST_KEYS = ("name", "type", "id", *ARGUMENTS)  # a call may have other orders than the usual one, of HEAD
NO_CALL = re.compile(rf'\{{\s*(?:[^\s"]|"(?!(?:{"|".join(FIRST_KEYS)})")[^"]*")')
LONGEST_HEAD = 1024  # characters
PIECE = 4096  # characters that are read at once: steps copy what is left of them


class Parser(Protocol):
    """Finds tool calls in text that comes in pieces."""

    @property
    def called(self) -> bool:
        """Whether it has found one."""

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


class Call(NamedTuple):
    """A call that was read at once. `arguments`: the text of a JSON object."""

    name: str
    arguments: str


class CallParser:
    """Finds the calls of one output. Calls are {"name": ..., "arguments": {...}}, between the markers of a format."""

    def __init__(self, form: ToolFormat, names: Collection[str], most: int | None = None) -> None:
        """`names`: of the tools. `most`: the calls that are reported; later ones are left out."""
        self._form, self._names, self._most = form, names, most
        self._count = 0  # calls that have begun
        self._rest = ""  # text that is not understood yet
        self._held = ""  # what stands before it and is content if no call follows
        self._gap = ""  # white space between the content so far and a call after it
        self._has_content = self._after_call = False
        self._object = ObjectEnd()
        self._step: Callable[[bool], list[Object]] = self._content

    @property
    def called(self) -> bool:
        return self._count > 0

    def push(self, text: str) -> list[Object]:
        deltas: list[Object] = []
        for start in range(0, len(text), PIECE):
            self._rest += text[start : start + PIECE]
            deltas += self._drained(is_last=False)
        return deltas

    def finish(self) -> list[Object]:
        return self._drained(is_last=True)

    def _drained(self, is_last: bool) -> list[Object]:
        """Take steps until nothing changes. `is_last`: no more text will come."""
        deltas: list[Object] = []
        while True:
            before = self._step, self._rest
            deltas += self._step(is_last)
            if (self._step, self._rest) == before:
                return deltas

    # Steps: each reads some of the rest, or leaves it until there is more -------------------------------------------------

    def _content(self, is_last: bool) -> list[Object]:
        """Pass content on up to a marker, or to what may become one, without the white space before it."""
        if self._after_call:
            self._rest = self._rest.lstrip()
        places = [place for marker in self._form.markers if (place := self._rest.find(marker)) >= 0]
        if places:
            text = self._rest[: min(places)].rstrip()
            self._step = self._opening
        elif is_last:
            text = self._rest
        else:
            begun = max(overlap(self._rest, marker) for marker in self._form.markers)
            text = self._rest[: len(self._rest) - begun].rstrip()
        self._rest = self._rest[len(text) :]
        return self._said(text)

    def _opening(self, is_last: bool) -> list[Object]:
        """Find the object after a marker. The marker may be its first character."""
        start = self._rest.lstrip()
        marker = next(one for one in self._form.markers if start.startswith(one))
        found = start if marker == "{" else start[len(marker) :].lstrip()
        if not found and not is_last:
            return []
        length = len(self._rest) - len(found)
        self._held, self._rest = self._rest[:length], found
        if not found.startswith("{"):
            return self._refused(0)
        self._object, self._step = ObjectEnd(), self._call
        return []

    def _call(self, is_last: bool) -> list[Object]:
        """Decide whether an object is a call. One in the usual order is known before its arguments, others when they end."""
        if head := HEAD.match(self._rest, 0, LONGEST_HEAD):
            name = self._known(_string(head[1]))
            if name is None:
                return self._refused(1)
            self._rest, self._object, self._step = self._rest[head.end() :], ObjectEnd(), self._arguments
            return self._begun(name)
        if NO_CALL.match(self._rest, 0, LONGEST_HEAD):
            return self._refused(1)
        end = self._object.find(self._rest[self._object.read :])
        if end is None:
            return self._refused(len(self._rest)) if is_last else []
        call = _whole(self._rest[: self._object.read])
        if call is None or self._known(call.name) is None:
            return self._refused(self._object.read)
        self._rest, self._step = self._rest[self._object.read :], self._closing
        return [*self._begun(call.name), *self._more(call.arguments)]

    def _arguments(self, is_last: bool) -> list[Object]:
        end = self._object.find(self._rest)
        text, self._rest = self._rest[:end], "" if end is None else self._rest[end:]
        if end is not None:
            self._step = self._ending
        return self._more(text)

    def _ending(self, is_last: bool) -> list[Object]:
        """Find what follows the arguments: the end of the object, another key, or neither, which models may forget."""
        rest = self._rest.lstrip()
        if rest:
            self._object = ObjectEnd(depth=1)
            self._step = self._others if rest[0] in "}," else self._closing
        return []

    def _others(self, is_last: bool) -> list[Object]:
        """Leave out the keys after the arguments."""
        end = self._object.find(self._rest)
        self._rest = "" if end is None else self._rest[end:]
        if end is not None:
            self._step = self._closing
        return []

    def _closing(self, is_last: bool) -> list[Object]:
        """Leave out the marker that closes a call, if there is one."""
        closing, rest = self._form.closing, self._rest.lstrip()
        if rest.startswith(closing):
            rest = rest[len(closing) :]
        elif closing.startswith(rest) and not is_last:
            return []
        self._rest, self._after_call, self._step = rest, True, self._content
        return []

    # What steps have in common --------------------------------------------------------------------------------------------

    def _refused(self, length: int) -> list[Object]:
        """Pass on as content what looked like a call: what was held, and as many characters of the rest."""
        text, self._held = self._held + self._rest[:length], ""
        self._rest, self._step = self._rest[length:], self._content
        return self._said(text)

    def _said(self, text: str) -> list[Object]:
        if not text:
            return []
        text, self._gap = self._gap + text, ""
        self._has_content, self._after_call = True, False
        return [{"content": text}]

    def _known(self, name: str | None) -> str | None:
        """Return a name if a call may have it. After a marker of its own, a call of a tool that does not exist is a call."""
        return name if name and (self._form.marks_calls or name in self._names) else None

    def _begun(self, name: str) -> list[Object]:
        if self._has_content and not self._after_call:
            self._gap = self._held[: len(self._held) - len(self._held.lstrip())]
        self._held = ""
        self._count += 1
        call = {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
        return self._delta(call)

    def _more(self, arguments: str) -> list[Object]:
        return self._delta({"function": {"arguments": arguments}}) if arguments else []

    def _delta(self, call: Object) -> list[Object]:
        if self._most is not None and self._count > self._most:
            return []
        return [{"tool_calls": [{"index": self._count - 1, **call}]}]


class ObjectEnd:
    """Finds the end of a JSON object in text that comes in pieces. `read`: the characters up to there."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: the objects that have begun before the text."""
        self.read, self._depth = 0, depth
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Read on. Return where in this text the object ends, or None if it does not."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.read += place + 1
                    return place + 1
        self.read += len(text)
        return None


def _whole(text: str) -> Call | None:
    """Return the call that a complete object is, or None."""
    try:
        found = parse_json(text, strict=False)
    except BadJSON:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given: Any = next((found[key] for key in ARGUMENTS if found.get(key) is not None), {})
    return Call(found["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def _string(literal: str) -> str | None:
    try:
        found = parse_json(literal, strict=False)
    except BadJSON:
        return None
    return found if isinstance(found, str) else None


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
