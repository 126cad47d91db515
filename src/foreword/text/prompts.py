"""Prompt files and chat messages.

In: JSON lines, or one JSON list, with `turns` (Spec-Bench, MT-bench), `messages`, `conversations` (ShareGPT) or `prompt`, or
in the formats of HumanEval, GSM8K and MBPP; or plain text, one prompt per line; optionally compressed (.gz, .xz). `-` is
standard input. Out: `Prompt`s in file order. An unusable row is refused with its file and line, or added to the caller's
list of rows that were left out; no row is skipped silently.
"""

import gzip
import json
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from foreword.errors import PromptError
from foreword.files import BadJSON, lines_of, parse_json

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
LONGEST_LINE = 1 << 30  # bytes: a whole set may be one JSON list on one line
NO_CATEGORY = "prompts"
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file: what the user says, turn by turn, or a whole conversation."""

    id: str
    category: str
    turns: list[str]
    messages: list[Message] | None = None

    def first(self) -> str | list[Message]:
        """Return the prompt of the first answer: the first turn as a string, which models without a chat template take too;
        or the messages up to the last one of the user."""
        if self.messages is None:
            return self.turns[0]
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: last + 1]

    @property
    def answers(self) -> int:
        """How many answers it asks for: one per turn. A conversation has its replies already, except the last."""
        return len(self.turns) if self.messages is None else 1

    def after(self, replies: Sequence[str]) -> str | list[Message]:
        """Return the prompt of the next answer, after these replies to the turns before it."""
        if not replies:
            return self.first()
        messages: list[Message] = []
        for turn, reply in zip(self.turns, replies, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
        return [*messages, {"role": "user", "content": self.turns[len(replies)]}]


def check_messages(messages: object) -> list[Message]:
    """Check messages, and return them as chat templates expect them: every content is a string, and the arguments of tool
    calls are objects."""
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"chat messages must be a list with at least one message, got {_brief(messages)}")
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(place: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise PromptError(f'message {place} must be {{"role": ..., "content": ...}}, got {_brief(message)}')
    role, calls = message.get("role"), message.get("tool_calls")
    if role not in ROLES:
        raise PromptError(f"message {place} has role {_brief(role)}; use one of {', '.join(ROLES)}")
    where = f"message {place} ({role})"
    content = "" if message.get("content") is None and role == "assistant" and calls else message.get("content")
    text = _joined(where, content) if isinstance(content, list | tuple) else content
    if not isinstance(text, str):
        raise PromptError(f"{where} needs its content as a string or a list of text parts, got {_brief(content)}")
    if role == "user" and not text.strip():
        raise PromptError(f"{where} is empty; give it some text")
    given = {key: value for key, value in message.items() if value is not None}  # many templates would write "None"
    return given | {"content": text} | ({"tool_calls": _tool_calls(where, calls)} if calls else {})


def _joined(where: str, parts: Sequence[Any]) -> str:
    """Join the text parts of a content, which are those of the OpenAI API."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            found = f"a part of type {kind!r}" if kind else _brief(part)
            raise PromptError(f"{where} holds {found}; only text is supported: leave out images, audio and files")
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{where} has a text part without its text: {_brief(part)}")
    return "\n".join(part["text"] for part in parts)


def _tool_calls(where: str, calls: object) -> list[Any]:
    """Return tool calls with arguments as objects, which templates expect; they may be given as JSON strings."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, dict) for call in calls):
        raise PromptError(f"{where} needs its tool_calls as a list of objects, got {_brief(calls)}")
    return [_with_arguments(where, call) for call in calls]


def _with_arguments(where: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)  # some callers leave out this level
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where} has a tool call without the name of its function: {_brief(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}", strict=False)
        except BadJSON as error:
            raise PromptError(f"{where} calls {function['name']!r} with arguments that are not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise PromptError(f"{where} calls {function['name']!r} with {_brief(arguments)}; arguments are a JSON object")
    read = {**function, "arguments": arguments}
    return {**call, "function": read} if "function" in call else read


def read_prompts(path: str | Path, limit: int | None = None, left_out: list[str] | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a file, or all of them.

    A row that cannot be used is an error. With a list `left_out`, it adds a line to that list that says where and why.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"limit is {limit}; at least one prompt is needed")
    prompts: list[Prompt] = []
    parse = None
    for number, line in islice(_unlisted(path), None if limit is None else min(limit, sys.maxsize)):
        parse = parse or (_row if _holds_json(path, line) else _plain)
        try:
            prompts.append(parse(number, line))
        except PromptError as error:
            if left_out is None:
                raise PromptError(f"{_name(path)}, line {number}: {error}") from error
            left_out.append(f"line {number}: {error}")
    if not prompts and left_out:
        raise PromptError(f"{_name(path)}: none of {len(left_out)} rows can be used; {left_out[0]}")
    if not prompts:
        raise PromptError(f"{_name(path)} holds no prompts; give one prompt per line")
    return prompts


def groups(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Group prompts as reports do: `mt_bench` for the eight categories of MT-bench, otherwise by category.

    All questions of MT-bench have two turns; a `math` prompt with one turn comes from elsewhere and keeps its category.
    """
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        is_mt_bench = prompt.category in MT_BENCH and len(prompt.turns) == 2
        found.setdefault("mt_bench" if is_mt_bench else prompt.category, []).append(prompt)
    return found


def spread(prompts: Sequence[Prompt], per_group: int) -> list[Prompt]:
    """Choose at most `per_group` prompts of each group, evenly spaced within it, in file order."""
    if per_group < 1:
        raise PromptError(f"per_group is {per_group}; at least one prompt of each group is needed")
    chosen = set()
    for group in groups(prompts).values():
        count = min(per_group, len(group))
        chosen |= {id(group[i * len(group) // count]) for i in range(count)}
    return [prompt for prompt in prompts if id(prompt) in chosen]


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield number and stripped text of each line that is not blank."""
    try:
        with _open(path) as stream:
            for number, raw in enumerate(lines_of(stream, LONGEST_LINE), 1):
                # Decoded line by line, so that an error can name the line.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    yield number, line
    except UnicodeDecodeError as error:
        raise PromptError(f"{_name(path)}, line {number}: not UTF-8 ({error.reason}); convert the file") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read the prompt file {_name(path)}: {reason}") from error


def _unlisted(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file; if the file is one JSON list, yield each element as a line."""
    lines = _lines(path)
    for number, line in lines:
        if number > 1 or not line.startswith("[") or str(path).endswith(".txt"):
            yield number, line
            continue
        all_lines = [(number, line), *lines]
        try:
            rows = parse_json("\n".join(text for _, text in all_lines), strict=False)
        except BadJSON:
            yield from all_lines  # text that begins with a bracket, or bad JSON, which is refused line by line
        else:
            yield from ((place, json.dumps(row)) for place, row in enumerate(rows, 1))


def _open(path: str | Path) -> AbstractContextManager[BinaryIO]:
    if str(path) == "-":
        return nullcontext(sys.stdin.buffer)
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(Path(path).suffix, open)(path, "rb")


def _name(path: str | Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _holds_json(path: str | Path, first_line: str) -> bool:
    """Return whether a file holds JSON, by its name, otherwise by its first line."""
    name = str(path).removesuffix(".gz").removesuffix(".xz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return True
    return first_line.startswith("{") and not name.endswith(".txt")


def _plain(number: int, line: str) -> Prompt:
    return Prompt(str(number), NO_CATEGORY, [line])


def _row(number: int, line: str) -> Prompt:
    """Parse one line of JSON."""
    try:
        row = parse_json(line, strict=False)
        json.dumps(row, ensure_ascii=False).encode()
    except BadJSON as error:
        raise PromptError(f"not JSON ({error}); give one object per line") from error
    except UnicodeEncodeError as error:
        raise PromptError("holds half of a surrogate pair, which is no character; clean the text") from error
    if not isinstance(row, dict):
        raise PromptError(f"needs a JSON object, got {_brief(row)}; give one object per line")
    row = _as_question(row)
    names = (row.get(field) for field in ("question_id", "id", "task_id"))
    name = str(next((name for name in names if name is not None), number))
    category = str(row.get("category") or NO_CATEGORY)
    for field in ("messages", "conversations"):
        if field in row:
            messages = _conversation(row[field])
            turns = [message["content"] for message in messages if message["role"] == "user"]
            return Prompt(name, category, _check_turns(turns, field), messages)
    if "turns" in row:
        return Prompt(name, category, _check_turns(row["turns"], "turns"))
    if "prompt" in row:
        return Prompt(name, category, _check_turns([row["prompt"]], "prompt"))
    raise PromptError(f"needs one of turns, messages, conversations or prompt, has {', '.join(row) or 'nothing'}")


def _as_question(row: dict[str, Any]) -> dict[str, Any]:
    """Turn rows of HumanEval, MBPP and GSM8K, as they are published, into questions to a chat model."""
    if {"prompt", "entry_point"} <= row.keys():
        (begun,) = _check_turns([row["prompt"]], "prompt")
        question = f"Complete the following Python function.\n\n```python\n{begun.rstrip()}\n```"
        return {"category": "code", **row, "prompt": question}
    if {"text", "test_list"} <= row.keys():
        (task,), tests = _check_turns([row["text"]], "text"), "\n".join(_check_turns(row["test_list"], "test_list"))
        question = f"{task} Your code should pass these tests:\n\n```python\n{tests}\n```"
        return {"category": "code", **row, "prompt": question}
    if {"question", "answer"} <= row.keys():
        return {"category": "math", **row, "prompt": row["question"]}
    return row


def _conversation(messages: object) -> list[Message]:
    """Check messages with `role` and `content`, or with ShareGPT's `from` and `value`, and return the former."""
    if isinstance(messages, list):
        messages = [_from_sharegpt(message) if isinstance(message, dict) else message for message in messages]
    return check_messages(messages)


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    if "from" not in message:
        return message
    return {"role": SHAREGPT_ROLES.get(str(message["from"]), message["from"]), "content": message.get("value")}


def _check_turns(turns: object, field: str) -> list[str]:
    if not isinstance(turns, list) or not turns:
        raise PromptError(f"{field} needs a list of at least one string, got {_brief(turns)}")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise PromptError(f"{field} holds {_brief(turn)}, but must hold strings that are not empty")
    return turns


def _brief(value: object) -> str:
    """Return a value for an error message, in at most 60 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that nests too deep"
    return text if len(text) <= 60 else text[:57] + "..."
