"""Tool calls in text: however the text is cut, the same content and the same calls are found."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.serve.tool_formats import HERMES, LLAMA, ToolFormat
from foreword.serve.tool_text import CallParser, NoTools, Parser, merged

NAMES = ("add", "get_weather")
Found = tuple[str | None, list[tuple[str, str]]]


def parser_of(form: ToolFormat = HERMES, most: int | None = None) -> CallParser:
    return CallParser(form, NAMES, most)


def found(parser: Parser, *pieces: str) -> Found:
    """Return content and calls, and check the deltas: a call begins with its name, and is known by its index from then."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    assert all(len(delta) == 1 for delta in deltas)
    begun: list[str] = []
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(begun) and call["type"] == "function"
                assert call["function"]["name"] and call["function"]["arguments"] == ""
                begun.append(call["id"])
            else:
                assert call["index"] == len(begun) - 1 and call["function"].keys() == {"arguments"}
                assert call["function"]["arguments"]
        assert delta.get("content") != ""
    assert len({*begun}) == len(begun) and parser.called == bool(begun)
    message = merged(deltas)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"], calls


def hermes(arguments: str, name: str = "add", end: str = "\n</tool_call>") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}{end}'


ADD = ("add", '{"a": 1, "b": {"c": [2]}}')
TRICKY = '{"text": "a \\"} </tool_call> \\\\", "more": ["{", "ü😀\\u2028"]}'
# text: what is found in it
HERMES_TEXTS: dict[str, Found] = {
    hermes(ADD[1]): (None, [ADD]),
    f"Let me see.\n\n{hermes(ADD[1])}": ("Let me see.", [ADD]),
    f"{hermes(ADD[1])}\n{hermes('{}', 'get_weather')}\n": (None, [ADD, ("get_weather", "{}")]),
    f"one {hermes(ADD[1])} two {hermes('{}')} three ": ("one two three ", [ADD, ("add", "{}")]),
    hermes(TRICKY): (None, [("add", TRICKY)]),
    hermes("{}", end=""): (None, [("add", "{}")]),
    hermes("{}", end=hermes("{}")): (None, [("add", "{}")] * 2),
    # The model forgot a bracket, or the marker.
    '<tool_call>\n{"name": "add", "arguments": {}\n</tool_call> so': ("so", [("add", "{}")]),
    hermes("{}", end="\nand so on"): ("and so on", [("add", "{}")]),
    # Other orders, other keys, other arguments.
    '<tool_call>{"arguments": {"a": "ü"}, "name": "add"}</tool_call>': (None, [("add", '{"a": "ü"}')]),
    '<tool_call>{"name":"add","parameters":{"a":1},"id":"{7}"}</tool_call>.': (".", [("add", '{"a":1}')]),
    '<tool_call>{"name": "add"}</tool_call>': (None, [("add", "{}")]),
    '<tool_call>{"name": "add", "arguments": null}</tool_call>': (None, [("add", "{}")]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>': (None, [("add", '{"a": 1}')]),
    '<tool_call>{"name": "\\u0061dd", "arguments": {}}</tool_call>': (None, [("add", "{}")]),
    hermes("{}", "no_such_tool"): (None, [("no_such_tool", "{}")]),
    # The output ends within a call.
    '<tool_call>\n{"name": "add", "arguments": {"a": "so': (None, [("add", '{"a": "so')]),
    '<tool_call>\n{"name": "add", "arguments": {}': (None, [("add", "{}")]),
    '<tool_call>\n{"name": "add", "argu': ('<tool_call>\n{"name": "add", "argu', []),
    "so <tool_call>\n": ("so <tool_call>\n", []),
    "so <tool_ca": ("so <tool_ca", []),
    # What looks like a call and is none.
    "a <tool_call> is a tag": ("a <tool_call> is a tag", []),
    '<tool_call>{"other": 1}</tool_call> x': ('<tool_call>{"other": 1}</tool_call> x', []),
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>': ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    '<tool_call>{"name": "", "arguments": {}}</tool_call>': ('<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
    '<tool_call>{"name": add}</tool_call>': ('<tool_call>{"name": add}</tool_call>', []),
    "<tool_call>[1]</tool_call>": ("<tool_call>[1]</tool_call>", []),
    f"<tool_call> <tool_call>{{}} {hermes('{}')}": ("<tool_call> <tool_call>{}", [("add", "{}")]),
    '{"name": "add", "arguments": {}}': ('{"name": "add", "arguments": {}}', []),
    "<<tool_call": ("<<tool_call", []),
    " white space \n ": (" white space \n ", []),
    "\n\n": ("\n\n", []),
    "": ("", []),
}
LLAMA_TEXTS: dict[str, Found] = {
    '{"name": "add", "parameters": {"a": 1}}': (None, [("add", '{"a": 1}')]),
    '<|python_tag|>{"name": "add", "parameters": {}}': (None, [("add", "{}")]),
    '{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {}}': (
        None,
        [("add", "{}"), ("get_weather", "{}")],
    ),
    'I call {"type": "function", "name": "add", "parameters": {"x": "}"}} now': ("I call now", [("add", '{"x": "}"}')]),
    'See:\n{"name": "add", "arguments": {}}; \nDone': ("See:\nDone", [("add", "{}")]),
    '{"name": "no_such_tool", "parameters": {}}': ('{"name": "no_such_tool", "parameters": {}}', []),
    '{"name": "Ada", "born": 1815}': ('{"name": "Ada", "born": 1815}', []),
    'f() { return {"a": 1}; } <|python_tag|>print(1)': ('f() { return {"a": 1}; } <|python_tag|>print(1)', []),
    '{"answer": {"name": "no", "parameters": {}}} {': ('{"answer": {"name": "no", "parameters": {}}} {', []),
    '{"name": "add", "param': ('{"name": "add", "param', []),
}
CASES = [*((HERMES, *case) for case in HERMES_TEXTS.items()), *((LLAMA, *case) for case in LLAMA_TEXTS.items())]


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=[case[1] for case in CASES])
def test_every_cut_finds_the_same(form: ToolFormat, text: str, expected: Found) -> None:
    """Whole, character by character, and cut at every place; short texts at every two places."""
    assert found(parser_of(form), text) == expected
    assert found(parser_of(form), *text) == expected
    second = range(len(text) + 1)
    for one, two in itertools.product(second, second if len(text) < 80 else [len(text)]):
        first, last = min(one, two), max(one, two)
        assert found(parser_of(form), text[:first], text[first:last], text[last:]) == expected, (first, last)


FRAGMENTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", '{"name": "add", ', '"arguments": ', '"parameters":']
FRAGMENTS += ["{", "}", '"', "\\", ":", ",", ";", " ", "\n", '{"name"', '"add"', "{}", "null", "ü", "so", '{"a": 1}}']


@given(st.lists(st.sampled_from(FRAGMENTS)), st.lists(st.integers(0, 200)), st.sampled_from([HERMES, LLAMA]))
def test_any_text_in_any_pieces_finds_the_same(fragments: list[str], cuts: list[int], form: ToolFormat) -> None:
    text = "".join(fragments)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[one:two] for one, two in itertools.pairwise(places)]
    assert found(parser_of(form), *pieces) == found(parser_of(form), text)
    content, calls = found(parser_of(form), text)
    assert calls or content == text


@given(
    st.dictionaries(st.text(max_size=9), st.recursive(st.none() | st.text(max_size=9), st.lists, max_leaves=5), max_size=4)
)
def test_any_arguments_come_through(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    for form in (HERMES, LLAMA):
        call = form.prefix + f'{{"name": "add", "{form.key}": {text}}}' + form.suffix
        assert found(parser_of(form), *call) == (None, [("add", text)])


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = parser_of()
    pieces = ['<tool_call>\n{"name": "add", "arguments": {"a', '": 1', "}}"]
    deltas = [[list(delta["tool_calls"][0]["function"].values()) for delta in parser.push(piece)] for piece in pieces]
    assert deltas == [[["add", ""], ['{"a']], [['": 1']], [["}"]]]


def test_content_is_passed_on_as_it_comes() -> None:
    parser = parser_of()
    assert [parser.push(piece) for piece in ("one ", "two <", "b> ", "<tool_")] == [
        [{"content": "one"}],
        [{"content": " two"}],
        [{"content": " <b>"}],
        [],
    ]
    assert parser.push("fork") == [{"content": " <tool_fork"}]


def test_calls_after_the_most_are_left_out() -> None:
    text = f"{hermes('{}')}\n{hermes(ADD[1])} so"
    assert found(parser_of(most=1), *text) == ("so", [("add", "{}")])


def test_long_outputs_that_are_no_calls_take_linear_time() -> None:
    """What a model could be made to write. In quadratic time each of these would take minutes."""
    for form in (HERMES, LLAMA):
        for text in ('{"name": ' * 20_000, "{" * 100_000, "<tool_call>" * 10_000, '<tool_call>{"name": "' + "a" * 100_000):
            assert found(parser_of(form), text)[0] == text


def test_without_tools_text_is_content() -> None:
    text = hermes("{}")
    assert found(NoTools(), *text) == (text, [])
