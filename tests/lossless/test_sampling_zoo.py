"""Many samplings together in one batch, each equal to the truth; and the same seed gives the same output."""

from dataclasses import replace
from typing import Any

import pytest

from doubles import (
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    hf_logits,
    in_turns,
    prompts,
    requests,
    rerunning,
    target,
    target_for,
    truth,
    written,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.methods import METHODS, make

ZOO = [
    Sampling(seed=1),
    Sampling(temperature=0.7, seed=2),
    Sampling(temperature=1.5, top_k=1, seed=3),
    Sampling(temperature=1.5, top_k=5, seed=4),
    Sampling(temperature=1.2, top_p=0.6, seed=5),
    Sampling(temperature=1.2, min_p=0.2, seed=6),
    Sampling(repetition_penalty=1.8, seed=7),
    Sampling(repetition_penalty=0.6, seed=8),
    Sampling(temperature=1.1, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3, seed=9),
    Sampling(temperature=1.1, top_k=9, top_p=0.8, seed=10),
    Sampling(temperature=1.1, top_p=0.9, min_p=0.1, seed=11),
    Sampling(temperature=2.0, top_k=1000, seed=12),
    Sampling(presence_penalty=2.0, seed=13),
    Sampling(frequency_penalty=1.5, temperature=0.9, seed=14),
    Sampling(presence_penalty=-1.5, frequency_penalty=-0.5, repetition_penalty=1.2, temperature=1.1, seed=15),
    Sampling(logit_bias={5: 6.0, 9: 5.0, 11: -100}, seed=16),
    Sampling(logit_bias={"7": 4, "8": 3.5}, temperature=1.2, top_p=0.8, seed=17),
    Sampling(bad_word_ids=((6,), (5, 6, 7), (9, 11)), presence_penalty=0.4, seed=18),
    Sampling(bad_word_ids=tuple((a, b) for a in range(24) for b in range(0, 40, 3)), temperature=1.0, seed=19),
]


def zoo_requests() -> list[Request]:
    return [Request(prompt, sampling, max_new_tokens=12) for prompt, sampling in zip(prompts(len(ZOO)), ZOO, strict=True)]


def drafters() -> dict[str, Drafter]:
    sequences = [full_sequence(target().hf, request) for request in zoo_requests()]
    return {"plain": make("plain"), "token_recycling": make("token_recycling"), "liar": Liar(), "oracle": Oracle(sequences)}


@pytest.mark.parametrize("name", ["plain", "token_recycling", "liar", "oracle"])
def test_each_of_a_mixed_batch_equals_the_truth(name: str) -> None:
    model, asked = target(), zoo_requests()
    assert written(engine(drafters()[name], model, slots=7), asked) == [truth(model.hf, request) for request in asked]


def test_every_option_has_an_effect() -> None:
    """Each stage changes the output of some prompt, so the test above would notice one that does nothing."""
    model, prompt = target(), prompts(6)[4]
    noise = Sampling(temperature=1.2, seed=5)
    changes: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.4}, {"repetition_penalty": 1.8}]
    changes += [{"temperature": 0.0}, {"presence_penalty": 1.9}, {"frequency_penalty": 2.0}, {"logit_bias": {5: 9}}]
    first = truth(model.hf, Request(prompt, noise, max_new_tokens=20, ignore_eos=True))
    changes += [{"bad_word_ids": (tuple(first[2:4]),)}, {"bad_word_ids": (tuple(first[5:8]),)}]
    sequences = [truth(model.hf, Request(prompt, noise, max_new_tokens=20, ignore_eos=True))]
    for change in changes:
        sampling = Sampling(**{"temperature": 1.2, "seed": 5} | change)
        sequences.append(truth(model.hf, Request(prompt, sampling, max_new_tokens=20, ignore_eos=True)))
    assert len({tuple(text) for text in sequences}) == len(sequences)


def sample(seed: int | None, index: int = 0) -> list[int]:
    sampling = Sampling(temperature=1.0, seed=seed).seeded().derived(index)
    return written(engine(make("plain")), [Request(prompts(2)[1], sampling, max_new_tokens=12, ignore_eos=True)])[0]


def test_the_same_seed_gives_the_same_output() -> None:
    assert sample(3) == sample(3)


def test_another_seed_gives_another_output() -> None:
    assert len({tuple(sample(seed)) for seed in (0, 1, 2, -1, 2**62, 2**63)}) == 6


def test_without_a_seed_a_random_one_is_reported() -> None:
    asked = Request(prompts(2)[1], Sampling(temperature=1.0), max_new_tokens=12, ignore_eos=True)
    one, other = engine(make("plain")).generate([asked, asked])
    assert one.tokens != other.tokens
    assert one.request.sampling.seed is not None
    assert sample(one.request.sampling.seed) == one.tokens


def test_samples_of_one_prompt_differ_and_can_be_reproduced() -> None:
    together = written(
        engine(make("plain"), slots=3),
        [
            Request(prompts(2)[1], Sampling(temperature=1.0, seed=3).derived(i), max_new_tokens=12, ignore_eos=True)
            for i in range(5)
        ],
    )
    assert together == [sample(3, index) for index in range(5)]
    assert len({tuple(text) for text in together}) == 5


def test_a_derived_seed_is_not_a_neighbour() -> None:
    """Sample 1 of seed 3 is not sample 0 of seed 4, nor sample 2 of seed 2."""
    base = [Sampling(seed=seed).derived(index).seed for seed in range(20) for index in range(20)]
    assert len(set(base)) == 400


# What depends on the output so far ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sampling"),
    in_turns([*METHODS, "liar", "oracle"], [Sampling(seed=1), Sampling(temperature=0.8, seed=1)]),
)
def test_bad_words_and_penalties_are_lossless_with_any_drafter(name: str, sampling: Sampling) -> None:
    """Bad words are two or three tokens of the output without them, so drafts contain them; penalties count tokens of
    earlier rounds. Eight requests with different settings follow one another in the slots 2, 0 and 1."""
    model, free = target_for(name), requests(8, sampling, max_new_tokens=12, ignore_eos=True)
    sequences = [truth(model.hf, request) for request in free]
    ways: list[dict[str, Any]] = [
        {"bad_word_ids": (tuple(sequences[0][3:5]), tuple(sequences[0][7:10]))},
        {"presence_penalty": 1.5},
        {},
        {"bad_word_ids": (tuple(sequences[3][1:4]), (sequences[3][6],))},
        {"frequency_penalty": 2.0, "logit_bias": {sequences[4][2]: -100, 9: 2.5}},
        {"bad_word_ids": ((free[5].prompt[-1], sequences[5][0]),), "presence_penalty": -2.0},
        {},
        {"frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    ]
    asked = [replace(one, sampling=replace(one.sampling, **way)) for one, way in zip(free, ways, strict=True)]
    whole = [full_sequence(model.hf, request) for request in asked]
    # The oracle knows the outputs without bad words, so it drafts the bad words, and the true ones, so it drafts past them.
    drafts = {"liar": Liar(), "oracle": Oracle([*(full_sequence(model.hf, one) for one in free), *whole], lies=2)}
    runs = engine(drafts.get(name) or drafter(name, model), model, slots=3).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    for run in runs:
        text = [*run.request.prompt[-1:], *run.tokens]
        for word in run.request.sampling.bad_word_ids or ():
            ends = range(len(word), len(text) + 1)
            assert not any(tuple(text[end - len(word) : end]) == word for end in ends)
    assert runs[0].tokens != sequences[0] and runs[3].tokens != sequences[3] and runs[5].tokens[0] != sequences[5][0]
    assert runs[2].tokens == sequences[2] and runs[6].tokens == sequences[6]


def test_penalties_follow_the_rule_of_the_output_alone() -> None:
    """Greedy, token by token, by the transformers model's own logits: counts of the output, not of the prompt."""
    model, (request,) = target(), requests(2, max_new_tokens=12, ignore_eos=True)[1:]
    sampling = replace(request.sampling, presence_penalty=1.2, frequency_penalty=0.6, logit_bias={5: 1.5})
    text: list[int] = []
    for _ in range(12):
        logits = hf_logits(model.hf, [*request.prompt, *text])[-1].tolist()
        for token in range(len(logits)):
            logits[token] -= 0.6 * text.count(token) + 1.2 * (token in text) - 1.5 * (token == 5)
        text.append(max(range(len(logits)), key=lambda token: logits[token]))
    assert written(engine(make("token_recycling"), model), [replace(request, sampling=sampling)]) == [text]


@pytest.mark.parametrize("name", ["plain", "token_recycling"])
def test_captured_rounds_serve_the_settings_of_any_request(name: str) -> None:
    """A bucket that was captured with one request's bias, bad words and counts is replayed for the next one's."""
    model, asked = target(), [request for request in zoo_requests() for _ in range(2)]
    steps = engine(drafter(name, model), model, slots=3)
    steps.loop = rerunning(steps.loop, steps.drafter)
    assert written(steps, asked) == [truth(model.hf, request) for request in asked]
