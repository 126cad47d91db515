"""Grammars that an output must follow, for the library xgrammar: a JSON schema, a regular expression, rules in EBNF, or a
structural tag, which joins such parts.

In: settings, and a tokenizer. Out: a `GrammarSpec`, which is two strings and crosses processes; and its compiled form, from
which matchers are made. xgrammar is optional (extra `json`), and is imported where it is first used. White space between the
parts of JSON is bounded: a model that repeats it would never end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from foreword.errors import InputError
from foreword.files import BadJSON, parse_json

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

GrammarKind = Literal["json_schema", "regex", "grammar", "structural_tag"]
KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "grammar", "structural_tag")
NEEDED = {
    "json_schema": "a JSON schema as a mapping or as its text, or True for any JSON object",
    "regex": "a regular expression as a string",
    "grammar": "rules in EBNF as a string, the first of them called root",
    "structural_tag": "a structural tag of xgrammar as a mapping or as its text",
}
WRITTEN_IN_JSON = ("json_schema", "structural_tag")
ANY_OBJECT = '{"type":"object","additionalProperties":true}'
LONGEST = 1 << 17  # characters of a grammar
LONGEST_REASON = 240  # characters of xgrammar's message
MOST_WHITESPACE = 16  # characters between two parts of JSON: a line break, and 15 columns of indentation
CACHED_BYTES = 1 << 28  # of compiled grammars


@dataclass(frozen=True)
class GrammarSpec:
    """What an output must follow. `kind`: the name of the setting it comes from. `text`: schema, expression or rules."""

    kind: GrammarKind
    text: str

    @staticmethod
    def of(settings: Mapping[str, Any]) -> GrammarSpec | None:
        """Return the grammar in the settings of a request, with all checks but xgrammar's own; None if there is none."""
        given = [kind for kind in KINDS if settings.get(kind) is not None]
        if not given:
            return None
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} are given; an output follows one grammar, so give one of them")
        kind = given[0]
        require_xgrammar(kind)
        text = _object_text(kind, settings[kind]) if kind in WRITTEN_IN_JSON else _text(kind, settings[kind])
        return GrammarSpec(kind, text)


def require_xgrammar(what: str) -> None:
    """Refuse what needs xgrammar if it is not installed."""
    if find_spec("xgrammar") is None:
        raise InputError(f"{what} needs the package xgrammar, which is not installed; pip install 'foreword[json]'")


def _object_text(kind: GrammarKind, given: Any) -> str:
    """Return a JSON schema or a structural tag as text. Properties keep their order, in which they are written."""
    if given is True and kind == "json_schema":
        return ANY_OBJECT
    if isinstance(given, Mapping):
        try:
            given = json.dumps(dict(given))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{kind} is no JSON: {str(error)[:LONGEST_REASON]}; correct it") from error
    text = _text(kind, given)
    try:
        found = parse_json(text)
    except BadJSON as error:
        raise InputError(f"{kind} is no JSON: {str(error)[:LONGEST_REASON]}; correct it") from error
    if not isinstance(found, dict):
        raise InputError(f"{kind} holds a JSON {type(found).__name__}; give an object")
    return text


def _text(kind: GrammarKind, given: Any) -> str:
    if not isinstance(given, str):
        raise InputError(f"{kind} is of type {type(given).__name__}; give {NEEDED[kind]}")
    if not given.strip() or len(given) > LONGEST:
        raise InputError(f"{kind} has {len(given)} characters; give 1 to {LONGEST}, not only spaces")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{kind} is not valid Unicode at character {error.start}; correct it") from error
    return given


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps those that were used last. Threads may share it; other Python threads
    run while it compiles."""

    def __init__(self, vocabulary: Callable[[], str], keeps: bool = True) -> None:
        """`vocabulary`: what `Tokenizer.grammar_vocabulary` returns; called at the first grammar."""
        self._vocabulary, self._keeps = vocabulary, keeps

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return a matcher that has read nothing yet."""
        from xgrammar import GrammarMatcher  # noqa: PLC0415  optional

        return GrammarMatcher(self.compiled(spec))

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. It may take long and much memory: `grammar_check.check` has tried that before."""
        try:
            if spec.kind == "json_schema":
                return self._compiler.compile_json_schema(spec.text, max_whitespace_cnt=MOST_WHITESPACE)
            if spec.kind == "regex":
                return self._compiler.compile_regex(spec.text)
            if spec.kind == "structural_tag":
                return self._compiler.compile_structural_tag(spec.text)
            return self._compiler.compile_grammar(spec.text)
        except RuntimeError as error:
            raise InputError(f"{spec.kind} cannot be used: {_reason(error)}; correct it") from error

    @cached_property
    def _compiler(self) -> Any:
        from xgrammar import GrammarCompiler, TokenizerInfo  # noqa: PLC0415  optional

        info = TokenizerInfo.deserialize_json(self._vocabulary())
        # One thread: rounds may run next to it.
        return GrammarCompiler(info, max_threads=1, cache_enabled=self._keeps, cache_limit_bytes=CACHED_BYTES)


def _reason(error: RuntimeError) -> str:
    """Return the beginning of xgrammar's message, without the time and the C++ file in front of it."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()[:LONGEST_REASON]


def vocabulary_of(hf: Any, size: int, ends: Collection[int]) -> str:
    """Return the tokens of a transformers tokenizer for `GrammarCompiler`, as JSON of xgrammar. `size`: the width of the
    logits. `ends`: the end tokens, which are allowed where a grammar may end."""
    require_xgrammar("a grammar")
    from xgrammar import TokenizerInfo  # noqa: PLC0415  optional

    try:
        info = TokenizerInfo.from_huggingface(hf, vocab_size=size, stop_token_ids=sorted(ends))
    except (ValueError, RuntimeError) as error:
        reason = str(error)[:LONGEST_REASON]
        raise InputError(f"xgrammar cannot read this model's tokenizer: {reason}; leave grammars out") from error
    return _without_special(info, hf, size).serialize_json()


def _without_special(info: TokenizerInfo, hf: Any, size: int) -> TokenizerInfo:
    """Return the same without the text of special tokens. xgrammar takes <|im_end|> for text, which JSON may hold."""
    from xgrammar import TokenizerInfo  # noqa: PLC0415  optional

    added = getattr(hf, "added_tokens_decoder", {})
    special = {*hf.all_special_ids, *(token for token, one in added.items() if one.special)}
    pieces = [""] * size
    for piece, token in hf.get_vocab().items():
        if token < size and token not in special:
            pieces[token] = piece
    return TokenizerInfo(
        pieces,
        info.vocab_type,
        vocab_size=size,
        stop_token_ids=info.stop_token_ids,
        add_prefix_space=info.add_prefix_space,
    )
