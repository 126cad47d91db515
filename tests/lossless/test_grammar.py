"""Grammars: with any method, the tokens are those that plain decoding under the same grammar generates, alone and among
requests without one, eagerly and in captured rounds. The truth asks a new matcher before every token."""

from dataclasses import replace
from typing import Any

import pytest

from doubles import (
    END,
    SAMPLINGS,
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    json_tokenizer,
    requests,
    rerunning,
    run_to_end,
    target_for,
    truth,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.errors import GrammarError
from foreword.methods import METHODS, make
from foreword.model.model import Model
from foreword.text.grammar import GrammarSpec

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["ab","cab"]}},"required":["a","b"]}'
GRAMMARS = {
    "a schema": GrammarSpec("json_schema", SCHEMA),
    "any object": GrammarSpec("json_schema", '{"type":"object","additionalProperties":true}'),
    "a regular expression": GrammarSpec("regex", "(ab|c){2,9}[0-9]+"),
    "rules": GrammarSpec("grammar", 'root ::= "[" item ("," item)* "]"\nitem ::= "true" | "null" | root'),
}


def asked(sampling: Sampling, longest: int = 14) -> list[Request]:
    """Return six requests: four have a grammar, the others none."""
    plain = requests(6, sampling, max_new_tokens=longest)
    given = dict(zip((0, 2, 3, 5), GRAMMARS.values(), strict=True))
    return [replace(request, grammar=given.get(place)) for place, request in enumerate(plain)]


def drafting(name: str, model: Model, given: list[Request]) -> Drafter:
    sequences = [full_sequence(model.hf, request) for request in given]
    return {"liar": Liar(), "oracle": Oracle(sequences, lies=2)}.get(name) or drafter(name, model)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", [*METHODS, "liar", "oracle"])
def test_a_method_follows_grammars_without_loss(name: str, sampling: str, slots: int, captured: bool) -> None:
    model, given = target_for(name), asked(SAMPLINGS[sampling])
    steps = engine(drafting(name, model, given), model, slots, late=captured)
    if captured and steps.drafter.captures != "nothing":
        steps.loop = rerunning(steps.loop, steps.drafter)  # type: ignore[arg-type]
    runs = steps.generate(given)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in given]
    for run in runs:
        assert run.request.grammar is None or _follows(run.request.grammar, run.tokens)
    assert runs[1].tokens != [] and not steps.grammars.matchers


def _follows(grammar: GrammarSpec, tokens: list[int]) -> bool:
    """Return whether the text of an output, with or without its end, follows a grammar, by a matcher of text."""
    from doubles import GRAMMARS as compiler

    matcher, ended = compiler.matcher(grammar), tokens[-1:] == [END]
    text = json_tokenizer().decode(tokens[: len(tokens) - ended])
    return bool(matcher.accept_string(text)) and (not ended or matcher.accept_token(END))
