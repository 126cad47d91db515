"""`foreword try`: the line of the table that a model's parts suggest, and whether the walk with it agrees."""

import re
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from doubles import BY_LAW, EVERY_FAMILY, fresh
from foreword.errors import ModelUnsupported
from foreword.model.families import FAMILIES
from foreword.model.family import Family, Norms
from foreword.model.trial import NAMED_NORMS, find_line, judge, try_family

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


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("olmo", "Family('olmo')"),
        ("flex_olmo", "Family('flex_olmo', norms=POST_NORM, has_experts=True)"),
        ("cwm", "Family('cwm', windows='by type')"),
    ],
)
def test_an_unknown_family_that_needs_only_a_line(kind: str, line: str, tmp_path: Path) -> None:
    unknown(kind).save_pretrained(tmp_path)
    verdict = judge(tmp_path)
    assert (verdict.model_type, verdict.supported, verdict.line) == (kind, False, line)
    assert line in verdict.said
    FAMILIES[kind] = eval(line, NAMED_NORMS | {"Family": Family, "Norms": Norms})  # the line as a reader would paste it
    try:
        assert judge(tmp_path).supported
    finally:
        del FAMILIES[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nemotron", "its layers keep keyword arguments from their attention"),
        ("afmoe", "its layers have the norms .*, which no known family has together"),
        ("granitemoeshared", "differs from transformers by .* the most that rounding explains"),  # its second half is two
        ("mamba2", "recurrent"),
        ("gptj", "has no rotary_emb or wpe"),
    ],
)
def test_an_unknown_family_that_needs_more(kind: str, said: str, tmp_path: Path) -> None:
    more: dict[str, dict[str, int]] = {
        "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
        "gptj": {"rotary_dim": 8},
        "granitemoeshared": {"shared_intermediate_size": 16},
    }
    unknown(kind, **more.get(kind, {})).save_pretrained(tmp_path)
    verdict = judge(tmp_path)
    assert not verdict.supported and verdict.line is None and re.search(said, verdict.said)


def test_a_window_that_the_trial_does_not_reach_is_named(tmp_path: Path) -> None:
    fresh("mistral", torch.float32, sliding_window=200).save_pretrained(tmp_path)
    verdict = judge(tmp_path)
    assert verdict.supported and verdict.unreached_window == 200


def test_a_known_family_with_an_unsupported_part(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    fresh("llama", torch.float32, rope_parameters=rope).save_pretrained(tmp_path)
    verdict = judge(tmp_path)
    assert not verdict.supported and "'dynamic'" in verdict.said
