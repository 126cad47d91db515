"""Every way of choosing, side by side in one batch, each equal to the truth; and seeds mean what they say."""

import pytest

from doubles import Liar, Oracle, engine, full_text, prompts, target, truth, written
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.methods import make

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
]


def zoo_requests() -> list[Request]:
    return [Request(prompt, sampling, max_new_tokens=12) for prompt, sampling in zip(prompts(12), ZOO, strict=True)]


def drafters() -> dict[str, Drafter]:
    texts = [full_text(target().hf, request) for request in zoo_requests()]
    return {"plain": make("plain"), "token_recycling": make("token_recycling"), "liar": Liar(), "oracle": Oracle(texts)}


@pytest.mark.parametrize("name", ["plain", "token_recycling", "liar", "oracle"])
def test_each_of_a_mixed_batch_equals_the_truth(name: str) -> None:
    model, asked = target(), zoo_requests()
    assert written(engine(drafters()[name], model, slots=7), asked) == [truth(model.hf, request) for request in asked]


def test_the_zoo_is_not_one_animal() -> None:
    """Each stage changes the text of some prompt, so the test above would notice one that does nothing."""
    model, prompt = target(), prompts(6)[4]
    noise = Sampling(temperature=1.2, seed=5)
    changes = [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.4}, {"repetition_penalty": 1.8}, {"temperature": 0.0}]
    texts = [truth(model.hf, Request(prompt, noise, max_new_tokens=20, ignore_eos=True))]
    for change in changes:
        sampling = Sampling(**{"temperature": 1.2, "seed": 5} | change)
        texts.append(truth(model.hf, Request(prompt, sampling, max_new_tokens=20, ignore_eos=True)))
    assert len({tuple(text) for text in texts}) == len(texts)


def sample(seed: int | None, index: int = 0) -> list[int]:
    sampling = Sampling(temperature=1.0, seed=seed).seeded().derived(index)
    return written(engine(make("plain")), [Request(prompts(2)[1], sampling, max_new_tokens=12, ignore_eos=True)])[0]


def test_the_same_seed_gives_the_same_text() -> None:
    assert sample(3) == sample(3)


def test_another_seed_gives_another_text() -> None:
    assert len({tuple(sample(seed)) for seed in (0, 1, 2, -1, 2**62, 2**63)}) == 6


def test_no_seed_draws_one_and_names_it() -> None:
    asked = Request(prompts(2)[1], Sampling(temperature=1.0), max_new_tokens=12, ignore_eos=True)
    one, other = engine(make("plain")).generate([asked, asked])
    assert one.tokens != other.tokens
    assert one.request.sampling.seed is not None
    assert sample(one.request.sampling.seed) == one.tokens


def test_samples_of_one_prompt_differ_and_can_be_drawn_again() -> None:
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
