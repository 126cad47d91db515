"""A fingerprint distinguishes models, and matches the same model in another dtype or layout."""

import pytest
import torch

import foreword
from doubles import fresh
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model


def print_of(hf) -> Fingerprint:
    model = Model(hf, "tiny")
    try:
        return Fingerprint.of(model)
    finally:
        model.release()


def test_the_same_model_in_another_dtype_or_layout(folders, stock):
    own = print_of(stock["llama"])
    for options in ({}, {"fused_layers": False}, {"dtype": "bfloat16"}, {"dtype": "float16"}):
        with foreword.load(folders["llama"], "plain", device="cpu", **options) as llm:
            assert Fingerprint.of(llm.model).matches(own) and llm.model.name != own.name


@pytest.mark.parametrize("changed", ["model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", None])
def test_other_weights_are_another_model(changed):
    own, other = print_of(fresh("llama", torch.float32)), fresh("llama", torch.float32, seed=int(changed is None))
    if changed is not None:
        with torch.no_grad():
            other.get_parameter(changed)[0, 0] += 1
    assert not print_of(other).matches(own)
    assert not print_of(other.half()).matches(own)


def test_float16_of_weights_that_it_rounds_differently():
    """Random float32 weights: many of them round to another bfloat16 if they are rounded to float16 first."""
    own, half = print_of(fresh("llama", torch.float32)), print_of(fresh("llama", torch.float32).half())
    assert half.weights != own.weights and half.matches(own) and own.matches(half)


def test_other_shapes_are_another_model():
    own = print_of(fresh("llama", torch.float32))
    assert print_of(fresh("llama", torch.float32)).matches(own)
    assert not print_of(fresh("llama", torch.float32, vocab_size=47)).matches(own)
    assert print_of(fresh("llama", torch.float32, num_hidden_layers=5)).config != own.config


def test_a_fingerprint_survives_to_dict_and_from_dict():
    own = print_of(fresh("llama", torch.float32))
    assert Fingerprint.from_dict(own.to_dict()) == own and own.weights in str(own)
