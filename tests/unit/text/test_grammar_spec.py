"""Grammars from settings: what is refused before xgrammar sees it, and what a compiled grammar allows."""

import sys
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from doubles import END, GRAMMAR_COMPILER, VOCABULARY, json_tokenizer
from foreword.errors import InputError
from foreword.text import Tokenizer
from foreword.text.grammar import ANY_OBJECT, LONGEST, MOST_WHITESPACE, GrammarCompiler, GrammarSpec


def accepts(spec: GrammarSpec | None, text: str, compiler: GrammarCompiler = GRAMMAR_COMPILER, end: int = END) -> bool:
    assert spec is not None
    matcher = compiler.matcher(spec)
    return bool(matcher.accept_string(text) and matcher.accept_token(end))


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"json_schema": True}, "json_schema", ANY_OBJECT),
        ({"json_schema": {"type": "object", "title": "ä"}}, "json_schema", '{"type": "object", "title": "\\u00e4"}'),
        ({"json_schema": '{"type": "null"}', "regex": None}, "json_schema", '{"type": "null"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"', "temperature": 1.0}, "grammar", 'root ::= "a"'),
    ],
)
def test_a_setting_becomes_two_strings(settings: dict[str, Any], kind: Any, text: str) -> None:
    assert GrammarSpec.of(settings) == GrammarSpec(kind, text)
    assert GrammarSpec.of({"temperature": 1.0, "json_schema": None}) is None


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"json_schema": True, "regex": "a"}, "json_schema and regex are given.*give one"),
        ({"json_schema": False}, "of type bool; give a JSON schema"),
        ({"json_schema": 3}, "of type int"),
        ({"json_schema": "[1]"}, "holds a JSON list; give an object"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": {"a": float("nan")}}, "NaN is no number"),
        ({"json_schema": {"a": object()}}, "not JSON serializable"),
        ({"json_schema": nested(70)}, "deeper than 64 levels"),
        ({"json_schema": nested(20_000)}, "json_schema is no JSON"),
        ({"json_schema": {"a": "x" * LONGEST}}, f"characters; give 1 to {LONGEST}"),
        ({"regex": ""}, "regex has 0 characters"),
        ({"regex": ["a"]}, "of type list; give a regular expression"),
        ({"grammar": "\ud800"}, "not valid Unicode at character 0"),
    ],
)
def test_what_is_no_grammar_is_refused_in_few_words(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        GrammarSpec.of(settings)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (GrammarSpec("regex", "(" * 50_000), "regex cannot be used: Regex"),
        (GrammarSpec("json_schema", '{"type": "' + "strange" * 5000 + '"}'), "json_schema cannot be used: Unsupported type"),
        (GrammarSpec("grammar", "root ::= other"), 'grammar cannot be used: EBNF parser error.*Rule "other" is not defined'),
    ],
)
def test_what_xgrammar_refuses_is_said_in_few_words(spec: GrammarSpec, named: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        GRAMMAR_COMPILER.compiled(spec)
    assert len(str(caught.value)) < 400 and ".cc:" not in str(caught.value)


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(InputError, match=r"regex needs the package xgrammar.*pip install 'foreword\[json\]'"):
        GrammarSpec.of({"regex": "a"})


def test_white_space_in_json_is_bounded() -> None:
    """Enough for indentation, and not without end, also in strings' neighbourhood and in nested values."""
    spec = GrammarSpec.of({"json_schema": True})
    assert accepts(spec, '{\n  "a": [\n    12,\n    true\n  ]\n}')
    for before in ("{", '{"a":', '{"a"', '{"a": [1'):
        matcher = GRAMMAR_COMPILER.matcher(GrammarSpec("json_schema", ANY_OBJECT))
        assert matcher.accept_string(before + " " * MOST_WHITESPACE) and not matcher.accept_string(" ")


def test_a_schema_is_followed() -> None:
    spec = GrammarSpec.of({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}})
    assert accepts(spec, '{"a": 12}')
    assert not any(accepts(spec, wrong) for wrong in ('{"a": "b"}', "{}", '{"a": 1, "b": 2}', '{"a": 1} ', "[]"))


def test_special_tokens_are_no_text(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    """A string of JSON may hold their characters, and not them."""
    tokenizer = Tokenizer(hf_tokenizer)
    compiler = GrammarCompiler(lambda: tokenizer.grammar_vocabulary(300, frozenset({1})))
    special, word = hf_tokenizer.convert_tokens_to_ids("<|user|>"), tokenizer.piece_ids("<")
    matcher = compiler.matcher(GrammarSpec("regex", ".*"))
    assert not matcher.accept_token(special) and not matcher.accept_token(299)
    assert matcher.accept_token(word[0]) and matcher.accept_token(1) and matcher.is_terminated()


def test_a_vocabulary_is_made_once() -> None:
    tokenizer = json_tokenizer()
    ends = frozenset({END})
    assert tokenizer.grammar_vocabulary(VOCABULARY, ends) is tokenizer.grammar_vocabulary(VOCABULARY, ends)
