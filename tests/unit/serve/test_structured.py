"""Formats of outputs: which setting a field is, what is refused by the name of the field, and what rules allow."""

from typing import Any

import pytest

from doubles import VOCABULARY, json_tokenizer
from foreword.serve.errors import Refusal
from foreword.serve.fields import ChatFields, checked
from foreword.serve.structured import as_part, format_settings
from foreword.text import Tokenizer
from foreword.text.grammar import GrammarCompiler, GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


def settings(**given: Any) -> Any:
    fields, unknown = checked({"messages": [], **given}, ChatFields)
    assert unknown == 0
    return format_settings(fields, fields.response_format)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json_schema": SCHEMA}),
        ({"response_format": TAG}, {"structural_tag": TAG}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": True}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, {"grammar": 'root ::= "a" | "b\\""'}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["yes", "no"]}, {"grammar": 'root ::= "yes" | "no"'}),
        ({"guided_grammar": "root ::= [a]", "response_format": {"type": "text"}}, {"grammar": "root ::= [a]"}),
    ],
    ids=str,
)
def test_a_format_becomes_one_setting(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings(**given) == expected


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ({"response_format": {}}, "response_format", "type is one of text, json_object"),
        ({"response_format": {"type": "xml"}}, "response_format", "type is one of"),
        ({"response_format": {"type": ["text"]}}, "response_format", "type is one of"),
        ({"response_format": "text"}, "response_format", "Expected `object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "json_schema.schema must be",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "response_format.format must be"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs", "must hold a string"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "json_object: true"),
        ({"structured_outputs": {"structural_tag": {"structures": []}}}, "structured_outputs", "format must be an object"),
        ({"guided_json": "{"}, "guided_json", "a JSON schema that is no JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be an object"),
        ({"guided_choice": []}, "guided_choice", "none of them empty"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex are given"),
    ],
    ids=str,
)
def test_what_is_no_format_is_refused_by_the_field(given: dict[str, Any], named: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        settings(**given)
    assert caught.value.status == 400 and caught.value.param == named


@pytest.fixture(scope="module")
def compiler(hf_tokenizer: Any) -> GrammarCompiler:
    tokenizer = Tokenizer(hf_tokenizer)
    return GrammarCompiler(lambda: tokenizer.grammar_vocabulary(len(hf_tokenizer), frozenset({1})))


def accepts(compiler: GrammarCompiler, given: dict[str, Any], text: str) -> bool:
    spec = GrammarSpec.of(given)
    assert spec is not None
    matcher = compiler.matcher(spec)
    return bool(matcher.accept_string(text) and matcher.accept_token(1))


def test_choices_allow_exactly_these_texts(compiler: GrammarCompiler) -> None:
    """Whatever characters they have."""
    texts = ["yes", "no", 'a "quoted" one', "back\\slash", "two\nlines\t", "ü😀\u2028", "[a-z]", "\x01"]
    found = settings(structured_outputs={"choice": texts})
    assert all(accepts(compiler, found, text) for text in texts)
    assert not any(accepts(compiler, found, text) for text in ("", "ye", "yesno", "b", "back\\\\slash"))


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        ({"guided_json": SCHEMA}, '{"a": 1}', '{"b": 1}'),
        ({"guided_regex": "[ab]{2}"}, "ab", "abc"),
        ({"guided_choice": ["yes"]}, "yes", "no"),
        ({"response_format": TAG}, "a", "b"),
    ],
    ids=str,
)
def test_a_format_allows_the_same_as_a_part(
    compiler: GrammarCompiler, given: dict[str, Any], right: str, wrong: str
) -> None:
    """As a part it stands next to tool calls."""
    alone = settings(**given)
    part = {"structural_tag": {"type": "structural_tag", "format": as_part(alone)}}
    for one in (alone, part):
        assert accepts(compiler, one, right) and not accepts(compiler, one, wrong)


def test_white_space_is_bounded_in_parts_too() -> None:
    tokenizer = json_tokenizer()
    compiler = GrammarCompiler(lambda: tokenizer.grammar_vocabulary(VOCABULARY, frozenset({2})))
    part = as_part(settings(guided_json=SCHEMA))
    tag = {"structural_tag": {"type": "structural_tag", "format": part}}
    spec = GrammarSpec.of(tag)
    assert spec is not None
    matcher = compiler.matcher(spec)
    assert matcher.accept_string("{" + " " * 16) and not matcher.accept_string(" ")
