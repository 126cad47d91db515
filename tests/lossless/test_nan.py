"""A target that answers NaN is an error, under every way of choosing; the others in the batch do not suffer."""

import math

import pytest
import torch
from doubles import Liar, engine, fresh, requests, truth
from transformers import PreTrainedModel

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


def test_the_others_in_the_batch_do_not_suffer() -> None:
    """One token's embedding is NaN. Who has it in the prompt is given up; the neighbour's text goes on unharmed."""
    hf = fresh("qwen3")
    with torch.no_grad():
        hf.model.embed_tokens.weight[7] = math.nan
    poisoned, healthy = Request((3, 7, 4), Sampling(seed=1), 9), Request((3, 9, 4), Sampling(seed=1), 9)
    assert 7 not in truth(hf, healthy)
    steps = engine(make("plain"), Model(hf), slots=2)
    bad, good = steps.add(poisoned), steps.add(healthy)
    with pytest.raises(NumericsError):
        while not good.done:
            steps.step()
    steps.abort(bad)
    while steps.busy:
        steps.step()
    assert good.tokens == truth(hf, healthy)
