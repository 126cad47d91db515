"""A model's sampling defaults: which options of its generation config are used, and which are ignored with a warning."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from foreword.errors import ForewordWarning
from foreword.model.generation import IGNORED, sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def defaults(**options: Any) -> dict[str, Any]:
    return sampling_defaults(SimpleNamespace(generation_config=GenerationConfig(**options)))


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "max_length": 4096, "max_new_tokens": 9}, {}),
        (QWEN, {name: value for name, value in QWEN.items() if name != "do_sample"}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0}, {}),
    ],
    ids=str,
)
def test_options_that_are_used(options: dict[str, Any], used: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForewordWarning)
        assert defaults(**options) == used


def test_a_model_without_generation_config_has_no_defaults() -> None:
    assert sampling_defaults(SimpleNamespace()) == {}
    assert sampling_defaults(SimpleNamespace(generation_config=None)) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 4), ("no_repeat_ngram_size", 3), ("typical_p", 0.2), ("bad_words_ids", [[5]]), ("stop_strings", ["x"])],
)
def test_unsupported_options_are_named(name: str, value: Any) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(**{"temperature": 0.5, name: value}))
    with pytest.warns(ForewordWarning, match=f"{name}={value!r}".replace("[", r"\[")):
        assert sampling_defaults(model) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("top_p", 0), ("top_k", 2.5), ("min_p", "a"), ("top_k", True)]
)
def test_invalid_options_are_ignored_with_a_warning(name: str, value: Any) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(**{"repetition_penalty": 1.1, name: value}))
    with pytest.warns(ForewordWarning, match=f"{name}={value!r}"):
        assert sampling_defaults(model) == {"repetition_penalty": 1.1}


def test_top_k_may_be_switched_off_in_two_ways() -> None:
    assert sampling_defaults(SimpleNamespace(generation_config=SimpleNamespace(top_k=-1))) == {"top_k": 0}


def test_ignored_options_are_attributes_of_a_generation_config() -> None:
    known = vars(GenerationConfig())
    assert {name for name in IGNORED if name not in known} <= {"penalty_alpha"}
