"""The law: with any method, the tokens are those that the transformers model generates alone."""

import pytest
import torch

from doubles import (
    CONTEXT,
    DRAFTING,
    SAMPLINGS,
    VOCABULARY,
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    requests,
    target,
    target_for,
    truth,
    written,
)
from foreword.engine.request import Request
from foreword.methods import METHODS

# One sequence takes another code path than three together, in every family.
CASES = [("llama", 1), ("llama", 3), ("qwen3", 1), ("qwen3", 3), ("smollm3", 3), ("gemma2", 3)]
LOOPED = [("foreword_looped", 1), ("foreword_looped", 3)]
every_family = pytest.mark.parametrize(("family", "slots"), CASES)


# Every method runs in every case, greedy and sampled in turns: of two neighbours in the table, one samples what the other
# decodes greedily.
TRUTHS = [
    (name, [*SAMPLINGS][(number + place) % 2], *case)
    for number, (name, method) in enumerate(METHODS.items())
    for place, case in enumerate(LOOPED if method.looped else CASES)
]


@pytest.mark.parametrize(("name", "sampling", "family", "slots"), TRUTHS)
def test_a_method_writes_the_truth(name: str, sampling: str, family: str, slots: int) -> None:
    """Six prompts of 1 to 23 tokens: more than there are slots, and longer than a chunk."""
    model, asked = target(family), requests(6, SAMPLINGS[sampling], max_new_tokens=10)
    found = written(engine(drafter(name, model), model, slots), asked)
    assert found == [truth(model.hf, request) for request in asked]


@pytest.mark.parametrize("name", DRAFTING)
def test_a_method_that_drafts_writes_the_truth_of_a_looped_model(name: str) -> None:
    model, asked = target("foreword_looped"), requests(3, SAMPLINGS["T=0.8"], max_new_tokens=8)
    assert written(engine(drafter(name, model), model), asked) == [truth(model.hf, request) for request in asked]


@every_family
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_lies_change_nothing(sampling: str, family: str, slots: int) -> None:
    model, asked = target(family), requests(6, SAMPLINGS[sampling])
    assert written(engine(Liar(), model, slots), asked) == [truth(model.hf, request) for request in asked]


@every_family
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_correct_tokens_among_wrong_ones_are_found(sampling: str, family: str, slots: int) -> None:
    model, asked = target(family), requests(6, SAMPLINGS[sampling])
    oracle = Oracle([full_sequence(model.hf, request) for request in asked])
    runs = engine(oracle, model, slots).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(count > oracle.depth for run in runs for count in run.accepted[:-1])


@pytest.mark.parametrize("name", [*METHODS, "oracle"])
def test_texts_that_grow_past_a_step_of_keys(name: str) -> None:
    """Attention reads keys up to a multiple of 64, and a round may cross one."""
    model, context = target_for(name), 2 * CONTEXT
    tokens = torch.randint(3, VOCABULARY, (3, 64), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = zip(tokens, (50, 57, 62), strict=True)
    asked = [Request(tuple(text[:size]), SAMPLINGS["greedy"], 14, ignore_eos=True) for text, size in sizes]
    oracle = Oracle([full_sequence(model.hf, request) for request in asked])
    made = engine(oracle if name == "oracle" else drafter(name, model), model, context=context)
    assert written(made, asked) == [truth(model.hf, request, context) for request in asked]


@pytest.mark.parametrize("name", [name for name in DRAFTING if name != "plain"])
def test_a_method_is_sometimes_right(name: str) -> None:
    """The law above would also hold for a drafter that never drafts; this test ensures that real drafts are tested."""
    model, asked = target(), requests(6, max_new_tokens=30, ignore_eos=True)
    runs = engine(drafter(name, model), model).generate(asked)
    assert sum(len(run.tokens) for run in runs) > 1.1 * sum(len(run.accepted) for run in runs)
