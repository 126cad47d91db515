"""A target that answers NaN is an error, under every way of choosing; the others in the batch do not suffer."""

import math

import pytest
import torch
from transformers import PreTrainedModel

from doubles import Liar, engine, fresh, requests, run_to_end, truth
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.errors import NumericsError
from foreword.methods import make
from foreword.model.model import Model

WAYS = {
    "greedy": Sampling(seed=1),
    "drawn": Sampling(temperature=0.8, seed=1),
    "top_k": Sampling(temperature=0.8, top_k=3, seed=1),
    "top_p": Sampling(temperature=0.8, top_p=0.9, seed=1),
    "min_p": Sampling(temperature=0.8, min_p=0.1, seed=1),
    "penalty": Sampling(repetition_penalty=1.3, seed=1),
}
WEIGHTS = {
    "a layer": "model.layers.2.mlp.down_proj.weight",
    "one row of the head": "lm_head.weight",
}


def broken(weight: str) -> PreTrainedModel:
    hf = fresh("qwen3")
    with torch.no_grad():
        hf.get_parameter(weight)[7] = math.nan
    return hf


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_nan_is_an_error(weight: str, way: str) -> None:
    asked = requests(3, WAYS[way])
    for drafter in (make("plain"), Liar()):
        with pytest.raises(NumericsError, match="NaN"):
            engine(drafter, Model(broken(WEIGHTS[weight]))).generate(asked)


POISON = 7


def poisoned_model() -> PreTrainedModel:
    """One token's embedding is NaN: who has it in the prompt gets NaN, and nobody else."""
    hf = fresh("qwen3")
    with torch.no_grad():
        hf.model.embed_tokens.weight[POISON] = math.nan
    return hf


SICK = Request((3, POISON, *range(10, 20)), Sampling(seed=1), 9)
HEALTHY = Request((3, 9, 4), Sampling(seed=1), 9)


def test_the_others_in_the_batch_do_not_suffer() -> None:
    """Who has the token is given up; the neighbour's text goes on unharmed, and so does the next in that slot."""
    hf = poisoned_model()
    assert POISON not in truth(hf, HEALTHY)
    steps = engine(make("plain"), Model(hf), slots=2)
    bad, good = steps.add(SICK), steps.add(HEALTHY)
    with pytest.raises(NumericsError):
        run_to_end(steps)
    assert bad.finish_reason == "abort" and bad.tokens == []
    after = [steps.add(HEALTHY) for _ in range(2)]
    run_to_end(steps)
    assert [run.tokens for run in (good, *after)] == [truth(hf, HEALTHY)] * 3


@pytest.mark.parametrize("after", [1, 2])
def test_a_slot_left_with_nan_serves_the_next(after: int) -> None:
    """The sick one is given up while its prompt is read: no round has seen the NaN that its rows hold."""
    hf = poisoned_model()
    steps = engine(make("plain"), Model(hf), slots=1)
    bad = steps.add(SICK)
    for _ in range(after):
        steps.step()
    steps.abort(bad)
    (run,) = steps.generate([HEALTHY])
    assert run.tokens == truth(hf, HEALTHY)
