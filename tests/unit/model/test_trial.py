"""`foreword try`: the line of the table that a model's parts suggest, and whether the walk with it agrees."""

from dataclasses import MISSING, Field, fields, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from doubles import BY_LAW, EVERY_FAMILY, fresh
from foreword.errors import ModelUnsupported
from foreword.model.families import FAMILIES
from foreword.model.family import Family
from foreword.model.trial import find_line, try_family

SAID = {"name": "", "models": "", "special": "", "fused": False}
WITHOUT = {"qwen3": {"windows": "none"}}  # what the tiny model of a family does not show
RUN_ONCE = [family for family in (*EVERY_FAMILY, *BY_LAW) if not FAMILIES[family].loops]
SMALL: dict[str, Any] = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def shown(family: str) -> Family:
    """Return the line of a family, with only what its tiny model shows."""
    return replace(FAMILIES[family], **WITHOUT.get(family, {}))


def unknown(kind: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | fields), attn_implementation="eager").eval()


@pytest.mark.parametrize("family", RUN_ONCE)
def test_the_line_of_a_known_family_is_found(family: str) -> None:
    """The parts alone say the same as the table, and each word of it is needed."""
    hf, listed = fresh(family, torch.float32, attn_implementation="eager"), shown(family)
    found = find_line(hf)
    assert found.agrees
    assert replace(found.family, **SAID) == replace(listed, **SAID)


def differing(family: Family) -> list[Field[Any]]:
    """Return the fields of a line that change how its layers are walked."""
    told = (*SAID, "has_experts", "mlp", "final_norm", "loops")
    return [one for one in fields(family) if one.name not in told and getattr(family, one.name) != one.default]


@pytest.mark.parametrize("family", RUN_ONCE)
def test_a_line_without_one_of_its_words_does_not_agree(family: str) -> None:
    hf, listed = fresh(family, torch.float32, attn_implementation="eager"), shown(family)
    assert try_family(hf, listed).agrees
    for one in differing(listed):
        assert one.default is not MISSING
        try:
            trial = try_family(hf, replace(listed, **{one.name: one.default}))
        except (ModelUnsupported, AttributeError, TypeError):
            continue
        assert not trial.agrees, one.name
