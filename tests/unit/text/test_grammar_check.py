"""The trial of a grammar in a process of its own: time and memory limits, what is remembered, and what survives."""

import json
import os
import time
from collections.abc import Iterator

import pytest

from doubles import END, VOCABULARY, json_tokenizer
from foreword.errors import InputError
from foreword.text import grammar_check
from foreword.text.grammar import GrammarSpec
from foreword.text.grammar_check import GrammarChecker

FINE = GrammarSpec("regex", "[a-f]{3}")
BOMB = GrammarSpec("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}))


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.end()


def vocabulary() -> str:
    return json_tokenizer().grammar_vocabulary(VOCABULARY, frozenset({END}))


def test_a_process_serves_many_grammars_and_survives_bad_ones(checker: GrammarChecker) -> None:
    checker.check(FINE, vocabulary())
    process = checker._process
    assert process is not None and process.pid != os.getpid()
    for bad in (
        GrammarSpec("regex", "("),
        GrammarSpec("grammar", "root ::= b"),
        GrammarSpec("json_schema", '{"type": "b"}'),
    ):
        with pytest.raises(InputError, match=f"(?s){bad.kind} cannot be used: .*; correct it"):
            checker.check(bad, vocabulary())
    checker.check(GrammarSpec("grammar", 'root ::= "a"'), vocabulary())
    assert checker._process is process and process.poll() is None


def test_what_was_found_is_remembered_up_to_a_number(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "REMEMBERED", 2)
    tried: list[str] = []
    monkeypatch.setattr(checker, "_tried", lambda spec, _: tried.append(spec.text) or ("wrong" if spec.text == "c" else ""))
    for text in ("a", "b", "a", "c", "a", "b"):
        try:
            checker.check(GrammarSpec("regex", text), vocabulary())
        except InputError as error:
            assert str(error) == "wrong" and text == "c"
    assert tried == ["a", "b", "c", "b"]


def test_a_schema_that_takes_too_long_is_given_up(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next grammar gets a new process: the test below needs one."""
    checker.check(FINE, vocabulary())
    process = checker._process
    assert process is not None
    monkeypatch.setattr(grammar_check, "COMPILE_S", 0.3)
    started = time.monotonic()
    for _ in range(2):  # the second time it is remembered
        with pytest.raises(InputError, match="json_schema takes more than 0.3 seconds to compile; give a smaller one"):
            checker.check(BOMB, vocabulary())
    assert time.monotonic() - started < 5 and process.poll() is not None and checker._process is None


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    checker.check(GrammarSpec("regex", "[a-f]{4}"), vocabulary())
    process = checker._process
    assert process is not None
    process.kill()
    process.wait()
    checker.check(GrammarSpec("regex", "[a-f]{5}"), vocabulary())
    assert checker._process is not process
