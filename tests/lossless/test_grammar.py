"""Grammars: with any method, the tokens are those that plain decoding under the same grammar generates, alone and among
requests without one, eagerly and in captured rounds. The truth asks a new matcher before every token."""

from dataclasses import replace
from typing import Any

import pytest

from doubles import (
    END,
    GRAMMAR_COMPILER,
    POISON,
    SAMPLINGS,
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    hf_logits,
    json_tokenizer,
    poisoned_model,
    requests,
    rerunning,
    run_to_end,
    target_for,
    truth,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.errors import GrammarError, NumericsError
from foreword.methods import METHODS, make
from foreword.model.model import Model
from foreword.text.grammar import GrammarSpec

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["ab","cab"]}},"required":["a","b"]}'
GRAMMARS = {
    "a schema": GrammarSpec("json_schema", SCHEMA),
    "a regular expression": GrammarSpec("regex", "(ab|c){2,9}[0-9]+"),
    "rules": GrammarSpec("grammar", 'root ::= "[" item ("," item)* "]"\nitem ::= "true" | "null" | root'),
}
WAYS = [("greedy", 1, False), ("T=0.8", 3, False), ("greedy", 3, True), ("T=0.8", 1, True)]  # sampling, slots, captured


def asked(sampling: Sampling, longest: int = 10) -> list[Request]:
    """Return five requests: the first, third and fifth have a grammar, the others none."""
    plain = requests(5, sampling, max_new_tokens=longest)
    given = dict(zip((0, 2, 4), GRAMMARS.values(), strict=True))
    return [replace(request, grammar=given.get(place)) for place, request in enumerate(plain)]


def drafting(name: str, model: Model, given: list[Request]) -> Drafter:
    sequences = [full_sequence(model.hf, request) for request in given]
    return {"liar": Liar(), "oracle": Oracle(sequences, lies=2)}.get(name) or drafter(name, model)


@pytest.mark.parametrize(("sampling", "slots", "captured"), WAYS)
@pytest.mark.parametrize("name", [*METHODS, "liar", "oracle"])
def test_a_method_follows_grammars_without_loss(name: str, sampling: str, slots: int, captured: bool) -> None:
    model, given = target_for(name), asked(SAMPLINGS[sampling])
    steps = engine(drafting(name, model, given), model, slots, late=captured)
    if captured:
        steps.loop = rerunning(steps.loop, steps.drafter)  # type: ignore[arg-type]
    runs = steps.generate(given)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in given]
    for run in runs:
        assert run.request.grammar is None or _follows(run.request.grammar, run.tokens)
    assert not steps.grammars.matchers


def _follows(grammar: GrammarSpec, tokens: list[int]) -> bool:
    """Return whether the text of an output, with or without its end, follows a grammar, by a matcher of text."""
    matcher, ended = GRAMMAR_COMPILER.matcher(grammar), tokens[-1:] == [END]
    text = json_tokenizer().decode(tokens[: len(tokens) - ended])
    return bool(matcher.accept_string(text)) and (not ended or matcher.accept_token(END))


def test_correct_tokens_under_a_grammar_are_found() -> None:
    """The oracle drafts the output under each grammar, so that whole drafts are accepted, and long outputs take few rounds.
    One output ends where its grammar does."""
    model = target_for("plain")
    given = [replace(one, max_new_tokens=30) for one in asked(SAMPLINGS["greedy"])]
    given.append(replace(given[0], grammar=GrammarSpec("regex", "abc{3}")))
    runs = engine(Oracle([full_sequence(model.hf, request) for request in given], lies=0), model).generate(given)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in given]
    assert all(len(run.accepted) < len(run.tokens) / 2 for run in runs if len(run.tokens) > 8)
    assert runs[-1].finish_reason == "stop" and json_tokenizer().decode(runs[-1].tokens) == "abccc"


@pytest.mark.parametrize("late", [False, True])
def test_a_grammar_changes_nothing_for_others_and_the_other_way_round(late: bool) -> None:
    """Requests enter one by one, so that rounds with and without a grammar alternate, and one is aborted."""
    model, given = target_for("token_recycling"), [*asked(SAMPLINGS["T=0.8"]), *asked(SAMPLINGS["greedy"])]
    steps = engine(drafter("token_recycling", model), model, 3, late=late)
    runs = []
    for request in given:
        runs.append(steps.add(request))
        for _ in range(3):
            steps.step()
    steps.abort(steps.add(replace(given[0], max_new_tokens=40)))
    run_to_end(steps)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in given]


def test_other_settings_hold_next_to_a_grammar() -> None:
    """Penalties, bias, filters, bad words and log-probabilities, in one batch. Log-probabilities are the model's own."""
    model, (plain,) = target_for("plain"), requests(3, max_new_tokens=10)[2:]
    ways: list[dict[str, Any]] = [
        {"temperature": 1.2, "top_k": 6, "top_p": 0.8, "seed": 3},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "seed": 4},
        {"logit_bias": {5: 3.0}, "logprobs": 2, "seed": 5},
        {"bad_word_ids": ((33, 34),), "seed": 6},
    ]
    given = [replace(plain, sampling=Sampling(**way), grammar=GRAMMARS["a regular expression"]) for way in ways]
    runs = engine(Liar(), model, slots=4).generate(given)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in given]
    raw = hf_logits(model.hf, [*given[2].prompt, *runs[2].tokens]).log_softmax(-1)
    found = [float(raw[len(plain.prompt) - 1 + place, token]) for place, token in enumerate(runs[2].tokens)]
    assert [one.logprob for one in runs[2].logprobs] == pytest.approx(found)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", ["plain", "liar"])
def test_a_request_without_a_token_left_fails_alone(name: str, sampling: Sampling) -> None:
    """It may write only tokens that its grammar bars."""
    model = target_for("plain")
    steps = engine(drafting(name, model, []) if name == "liar" else make("plain"), model)
    stuck = replace(requests(1)[0], sampling=replace(sampling, allowed_token_ids=(5, 6)), grammar=GrammarSpec("regex", "a+"))
    others = asked(sampling)[:3]
    failed, *runs = [steps.add(request) for request in (stuck, *others)]
    run_to_end(steps)
    assert failed.finish_reason == "abort" and failed.tokens == [] and isinstance(failed.error, GrammarError)
    assert "after 0 new tokens no token is left" in str(failed.error)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in others]


def test_a_nan_under_a_grammar_is_an_error_of_that_request() -> None:
    hf = poisoned_model()
    grammar = GrammarSpec("regex", "[0-9]{20}")
    sick = Request((3, POISON, 9), Sampling(seed=1), 9, grammar=grammar)
    healthy = replace(sick, prompt=(3, 9, 4))
    steps = engine(make("plain"), Model(hf), slots=2)
    bad, good = steps.add(sick), steps.add(healthy)
    run_to_end(steps)
    assert bad.finish_reason == "abort" and isinstance(bad.error, NumericsError)
    assert good.tokens == truth(hf, healthy) and len(good.tokens) == 9
