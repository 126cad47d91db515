"""Log-probabilities of prompt tokens are those of the transformers model, with any drafter and any other prompts."""

from dataclasses import replace

import pytest

from doubles import Oracle, drafter, engine, full_sequence, hf_logits, prompts, requests, target_for, tokenizer, truth
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine import prefill
from foreword.engine.request import Logprob, Request, Running
from foreword.errors import InputError
from foreword.methods import METHODS, make
from foreword.results import Result
from foreword.text import TextStream

# Prompts of one token, of less and of more than a chunk of five; the last request wants no logprobs.
ASKED = [
    replace(request, prompt_logprobs=top, max_new_tokens=6)
    for request, top in zip(requests(5, Sampling(temperature=0.8, seed=3)), (2, 0, 3, 100, None), strict=True)
]


def check(runs: list[Running], name: str = "plain") -> None:
    hf = target_for(name).hf
    for run in runs:
        assert run.tokens == truth(hf, run.request)
        top = run.request.prompt_logprobs
        found = [] if top is None else run.prompt_logprobs
        assert run.prompt_logprobs == found and [one.token for one in found] == list(run.request.prompt[1:])[: len(found)]
        assert len(found) == (0 if top is None else len(run.request.prompt) - 1)
        rows = hf_logits(hf, run.request.prompt).log_softmax(-1)
        for one, row in zip(found, rows[:-1], strict=False):
            likely = row.topk(min(top or 0, len(row)))
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-8)
            assert [token for token, _ in one.top] == likely.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(likely.values.tolist(), abs=1e-8)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", [*METHODS, "oracle"])
def test_they_are_the_model_s_own(name: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are read one by one, and all at once as on a GPU; the head computes two rows at a time."""
    monkeypatch.setattr(prefill, "LOGPROB_ROWS", 2)
    model = target_for(name)
    sequences = [full_sequence(model.hf, request) for request in ASKED]
    drafting: Drafter = Oracle(sequences) if name == "oracle" else drafter(name, model)
    steps = engine(drafting, model, slots=4)
    steps.joins_prompts = together
    check(steps.generate(ASKED), name)


def test_with_prompt_logprobs_nothing_is_reused() -> None:
    """Tokens that are not read again would have none."""
    request = Request(prompts(4)[3], Sampling(seed=1), max_new_tokens=3, reuse=True, prompt_logprobs=1)
    steps = engine(make("plain"), slots=1)
    runs = [steps.generate([request])[0] for _ in range(2)]
    check(runs)
    (after,) = steps.generate([replace(request, prompt_logprobs=None)])
    assert runs[1].reused == 0 < after.reused


def test_a_result_has_one_for_every_token_of_the_prompt() -> None:
    request = replace(ASKED[2], stream=TextStream(tokenizer()))
    (run,) = engine(make("plain")).generate([request])
    found = Result.of(run, "tiny", "plain").prompt_logprobs
    assert found is not None and len(found) == len(request.prompt) and found[0] is None
    assert all(isinstance(one, Logprob) and one.text == tokenizer().token_text(one.token) for one in found[1:])
    (without,) = engine(make("plain")).generate([ASKED[4]])
    assert "prompt_logprobs" not in Result.of(without, "tiny", "plain").to_dict()


@pytest.mark.parametrize("wrong", [-1, 101, 2.0, True, "3"])
def test_a_wrong_number_is_named(wrong: object) -> None:
    with pytest.raises(InputError, match=f"prompt_logprobs is {wrong!r}"):
        Request((5,), prompt_logprobs=wrong)  # type: ignore[arg-type]
