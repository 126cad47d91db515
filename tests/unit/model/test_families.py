"""What Foreword does not walk is refused by name, with what it does."""

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from doubles import fresh
from foreword.errors import ModelUnsupported
from foreword.model.families import FAMILIES, family_of


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families(family: str) -> None:
    assert family_of(fresh(family).config).name == family


def test_an_unknown_family_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ModelUnsupported, match=r"'gpt2'.*llama, qwen3"):
        family_of(GPT2Config())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_follow_the_length_are_refused(kind: str) -> None:
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelUnsupported, match=f"'{kind}'.*llama3"):
        family_of(config)


def test_windows_are_refused() -> None:
    config = Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ModelUnsupported, match="sliding_attention"):
        family_of(config)
