"""Masks: allowed tokens, and stop tokens held back below min_new_tokens. Each request has its own, with any drafter."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import (
    END,
    VOCABULARY,
    Liar,
    Oracle,
    drafter,
    engine,
    fresh,
    full_sequence,
    hf_logits,
    requests,
    target,
    target_for,
    truth,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.errors import InputError
from foreword.methods import METHODS, make
from foreword.model.model import Model

EVEN = tuple(range(0, VOCABULARY, 2))
WAYS: dict[str, Sampling] = {
    "greedy": Sampling(seed=1, allowed_token_ids=EVEN),
    "few": Sampling(temperature=1.2, seed=2, allowed_token_ids=(5, 9, 11, END)),
    "one": Sampling(temperature=1.2, seed=3, allowed_token_ids=(7,)),
    "filters": Sampling(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=4, allowed_token_ids=EVEN),
    "penalty": Sampling(repetition_penalty=1.7, seed=5, allowed_token_ids=(5, 9, 11, 13)),
    "logprobs": Sampling(seed=6, logprobs=3, allowed_token_ids=EVEN[3:]),
}
COMPANY: list[dict[str, Any]] = [
    {"sampling": Sampling(seed=1)},
    {"sampling": Sampling(temperature=1.3, top_p=0.7, seed=2)},
    {"sampling": Sampling(temperature=0.9, seed=4), "min_new_tokens": 12},
    {"sampling": Sampling(repetition_penalty=1.7, seed=3)},
]


def drafting(name: str, model: Model, asked: list[Request]) -> Drafter:
    sequences = [full_sequence(model.hf, request) for request in asked]
    return {"liar": Liar(), "oracle": Oracle(sequences, lies=2)}.get(name) or drafter(name, model)


def masked(**options: Any) -> list[Request]:
    return [replace(one, sampling=way) for one, way in zip(requests(6, **options), WAYS.values(), strict=True)]


@pytest.mark.parametrize("name", [*METHODS, "liar", "oracle"])
def test_only_allowed_tokens_are_sampled_with_any_drafter(name: str) -> None:
    """Six requests with their own masks among four without, in three slots, so that a slot's mask is replaced."""
    model, mine = target_for(name), masked(max_new_tokens=10)
    others = [replace(one, **options) for one, options in zip(requests(4, seed=9, max_new_tokens=12), COMPANY, strict=True)]
    asked = [mine[0], others[0], *mine[1:3], others[1], mine[3], *others[2:], *mine[4:]]
    runs = engine(drafting(name, model, asked), model, slots=3).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    for run in runs:
        allowed = run.request.sampling.allowed_token_ids
        assert allowed is None or set(run.tokens) <= set(allowed)
    assert runs[0].tokens == alone(model, mine[0]) and not set(runs[1].tokens) <= set(EVEN)


def alone(model: Model, request: Request) -> list[int]:
    """The likeliest of the allowed tokens, position by position, by the transformers model's own logits."""
    text, barred = list(request.prompt), torch.ones(VOCABULARY, dtype=torch.bool)
    barred[list(request.sampling.allowed_token_ids or ())] = False
    while len(text) < len(request.prompt) + request.max_new_tokens and text[-1] != END:
        text.append(int(hf_logits(model.hf, text)[-1].masked_fill(barred, -math.inf).argmax()))
    return text[len(request.prompt) :]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("late", [False, True])
def test_a_mask_alone_in_its_batch_and_in_company(way: str, late: bool) -> None:
    (request,) = requests(2, WAYS[way], max_new_tokens=10)[1:]
    others = [replace(one, **options) for one, options in zip(requests(4, seed=9), COMPANY, strict=True)]
    sequences = [full_sequence(target().hf, one) for one in (request, *others)]
    (lonely,) = engine(Oracle(sequences), late=late).generate([request])
    together, *_ = engine(Oracle(sequences), slots=5, late=late).generate([request, *others])
    assert lonely.tokens == together.tokens == truth(target().hf, request)


@pytest.mark.parametrize("sampling", [Sampling(seed=0), Sampling(temperature=0.8, seed=7)], ids=["greedy", "T=0.8"])
@pytest.mark.parametrize("name", ["plain", "liar", "oracle", "token_recycling", "prompt_lookup"])
def test_stop_tokens_are_held_back_below_the_least_length(name: str, sampling: Sampling) -> None:
    """The floor lies past the position of the stop token; other requests hold back other tokens, or none."""
    model, plain = target(), requests(6, sampling, max_new_tokens=16, ignore_eos=True)
    stops = [(truth(model.hf, request)[2], 7) for request in plain]
    floors = [0, 3, 6, 6, 10, 0]
    asked = [
        replace(request, stop_token_ids=stop, min_new_tokens=floor)
        for request, stop, floor in zip(plain, stops, floors, strict=True)
    ]
    runs = engine(drafting(name, model, asked), model, slots=4).generate(asked)
    for run in runs:
        whole, floor = truth(model.hf, run.request), run.request.min_new_tokens
        stop = next((i for i, token in enumerate(whole) if token in run.request.stop_token_ids), None)
        assert run.tokens == (whole if stop is None else whole[: stop + 1])
        assert not set(run.tokens[:floor]) & set(run.request.stop_token_ids)
        assert len(run.tokens) >= max(floor, 1)
    assert any(len(run.tokens) > 3 for run in runs) and len(runs[0].tokens) == 3


def test_settings_that_leave_no_token_are_refused() -> None:
    steps = engine(make("plain"))
    for bad, named in [
        ({"sampling": Sampling(allowed_token_ids=(END,)), "min_new_tokens": 2}, "min_new_tokens is 2"),
        ({"sampling": Sampling(allowed_token_ids=(END, 5)), "min_new_tokens": 2, "stop_token_ids": (5,)}, "min_new_tokens"),
        ({"min_new_tokens": 2, "stop_token_ids": tuple(range(VOCABULARY))}, "min_new_tokens"),
        ({"sampling": Sampling(allowed_token_ids=(VOCABULARY,))}, "allowed_token_ids holds 48.*vocabulary of 48"),
    ]:
        with pytest.raises(InputError, match=named):
            steps.add(Request((5,), **bad))
    (run,) = steps.generate([Request((5,), Sampling(allowed_token_ids=(END,)), max_new_tokens=4)])
    assert run.tokens == [END] and run.finish_reason == "stop"


@pytest.mark.parametrize("company", [False, True])
def test_a_nan_at_a_barred_token_is_found_as_without_the_mask(company: bool) -> None:
    """Also next to a request with filters, which look at all tokens: a result does not depend on other requests."""
    hf = fresh("qwen3")
    hf.lm_head.weight.data[3] = math.nan
    sick = Request((9, 8), Sampling(seed=1, allowed_token_ids=EVEN), max_new_tokens=3, speculate=False)
    others = [Request((9, 8), Sampling(temperature=1.0, top_p=0.5, seed=2), max_new_tokens=3)] if company else []
    steps = engine(make("plain"), Model(hf), slots=2)
    run, *_ = [steps.add(request) for request in (sick, *others)]
    while steps.busy:
        steps.step_for(())
    assert run.finish_reason == "abort" and run.tokens == []


def test_rows_of_masks_stay_where_they_are() -> None:
    """A captured round reads them there, whichever request enters; without masks the column is never made."""
    steps = engine(make("plain"), slots=2)
    steps.generate(requests(2, max_new_tokens=2))
    assert "barred" not in steps.state.table.columns
    steps.generate(masked(max_new_tokens=2))
    rows = steps.state.table.columns["barred"]
    address, shape = rows.data_ptr(), rows.shape
    steps.generate([*masked(max_new_tokens=2), *requests(3, max_new_tokens=2)])
    assert steps.state.table.columns["barred"].data_ptr() == address and shape == (2, VOCABULARY)
