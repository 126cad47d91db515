"""Logprobs are those of the transformers model itself, with any drafter: before penalties, temperature and filters."""

import pytest

from doubles import Oracle, engine, full_sequence, hf_logits, prompts, target, truth
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request, Running
from foreword.methods import make

ASKED = [
    Request(prompts(4)[1], Sampling(seed=1, logprobs=3), max_new_tokens=9),
    Request(prompts(4)[0], Sampling(temperature=1.4, top_k=9, repetition_penalty=1.5, seed=2, logprobs=5), 9),
    Request(prompts(4)[2], Sampling(temperature=0.8, seed=3, logprobs=0), max_new_tokens=9),
    Request(prompts(4)[3], Sampling(temperature=0.8, seed=4), max_new_tokens=9),
]


def runs_of(kind: str) -> list[Running]:
    sequences = [full_sequence(target().hf, request) for request in ASKED]
    drafter: Drafter = Oracle(sequences) if kind == "oracle" else make(kind)
    return engine(drafter, slots=4).generate(ASKED)


@pytest.mark.parametrize("kind", ["plain", "oracle", "token_recycling"])
def test_logprobs_are_the_model_s_own(kind: str) -> None:
    for run in runs_of(kind)[:3]:
        prompt, top = run.request.prompt, run.request.sampling.logprobs
        assert run.tokens == truth(target().hf, run.request)
        own = hf_logits(target().hf, [*prompt, *run.tokens[:-1]])[len(prompt) - 1 :].log_softmax(-1)
        assert [entry.token for entry in run.logprobs] == run.tokens
        for entry, row in zip(run.logprobs, own, strict=True):
            best = row.topk(top)
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-8)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-8)


@pytest.mark.parametrize("kind", ["plain", "oracle"])
def test_without_the_setting_there_are_none(kind: str) -> None:
    assert runs_of(kind)[3].logprobs == []


def test_more_alternatives_than_tokens() -> None:
    """The vocabulary has 48 tokens; asking for 100 gives them all."""
    asked = Request(prompts(2)[1], Sampling(seed=1, logprobs=100), max_new_tokens=2)
    (run,) = engine(make("plain")).generate([asked])
    assert all(len(entry.top) == 48 for entry in run.logprobs)
