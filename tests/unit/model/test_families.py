"""Supported families and every difference between them. Others are refused by name, with a list of the supported ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from doubles import BY_LAW, EVERY_FAMILY, chain, fresh, hf_hidden, hf_logits, hf_window, prefilled, target
from foreword.core.needs import Needs
from foreword.errors import ModelUnsupported
from foreword.model.families import FAMILIES, family_of
from foreword.model.model import Model
from foreword.model.obstacles import obstacles
from foreword.model.trial import try_family

TOKENS = [5, 9, 31, 8, 40, 7, 7, 12, 30, 3, 22]

every_family = pytest.mark.parametrize("family", EVERY_FAMILY)


def test_every_family_has_a_model_in_the_doubles() -> None:
    assert sorted((*EVERY_FAMILY, *BY_LAW)) == sorted(FAMILIES)


def test_every_family_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    heading = "| family | models, for example | what is special | layers run by |\n|---|---|---|---|\n"
    rows = [f"| `{one.name}` | {one.models} | {one.special} | {one.layers_run_by} |\n" for one in FAMILIES.values()]
    assert heading + "".join(rows) in page


@every_family
def test_a_family_is_known_by_its_type(family: str) -> None:
    assert family_of(fresh(family).config).name == family


@every_family
def test_the_cache_holds_what_the_layers_write(family: str) -> None:
    """It has the heads and width of transformers' own cache; a bias, a norm or a fused product does not change them."""
    model = target(family)
    with torch.no_grad():
        cache = model.hf(input_ids=torch.tensor([TOKENS]), use_cache=True).past_key_values
    shape = model.layer_stack.cache_shape()
    heads, width = cache.layers[0].keys.shape[1::2]
    assert (shape.layers, shape.heads, shape.width) == (len(cache.layers), heads, width) and len(cache.layers) >= 4


@every_family
def test_windows_and_caps_are_those_of_the_layers(family: str) -> None:
    """Also in a stack with copies of a layer in the middle."""
    model = target(family)
    windows = [hf_window(model.hf, layer) or 0 for layer in range(model.layers)]
    cap = 2.0 if family == "gemma2" else 0.0
    assert [spec.window for spec in model.layer_stack.attention_specs] == windows
    assert all(spec.softcap == cap for spec in model.layer_stack.attention_specs)
    model.allocate(1, 64, 16)
    for layer in range(model.layers):
        assert [spec.window for spec in model.stack(1, layers=2, init=layer).attention_specs] == [windows[layer]] * 2


@every_family
@torch.no_grad()
def test_the_halves_of_a_layer_are_the_layer(family: str) -> None:
    """Attention, then MLP, against the layer of transformers on the same rows, without a mask: all rows attend to all."""
    model = target(family)
    hf, hidden = model.hf, hf_hidden(model.hf, TOKENS)[1].unsqueeze(0)
    for layer, spec in zip(model.family.layers(hf), model.layer_stack.attention_specs, strict=True):
        turn = model.family.positions(hf, hidden, torch.arange(len(TOKENS)).unsqueeze(0), spec.rotary_table)
        halfway = model.family.attention_half(layer, hidden, position_embeddings=turn)
        whole = layer(hidden, attention_mask=None, position_embeddings=turn)
        torch.testing.assert_close(model.family.mlp_half(layer, halfway), whole, atol=1e-10, rtol=0)


# Each difference matters: a model without it has other logits, so the tests of the walk would fail if it were lost


def changed(hf: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    """Return the same weights with another config."""
    other = fresh(hf.config.model_type, **fields)
    other.load_state_dict(hf.state_dict())
    return other


DIFFERENCES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {"sliding_window": 6}),
    ("qwen2", {"max_window_layers": 3}),
    ("smollm3", {"sliding_window": 7}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("phi3", {"sliding_window": 8}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"attention_multiplier": 1.0}),
    ("granite", {"logits_scaling": 1.0}),
    ("gemma2", {"sliding_window": 6}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3_text", {"sliding_window": 5}),
    ("gemma3_text", {"final_logit_softcapping": None}),
    (
        "gemma3_text",
        {"rope_parameters": {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}},
    ),
]


@pytest.mark.parametrize(("family", "fields"), DIFFERENCES, ids=str)
def test_a_difference_changes_the_logits_and_is_implemented(family: str, fields: dict[str, Any]) -> None:
    usual = fresh(family)
    other = changed(usual, **fields)
    logits = logits_in_two_passes(other)
    assert (logits - hf_logits(usual, TOKENS)).abs().max() > 1e-3
    torch.testing.assert_close(logits, hf_logits(other, TOKENS), atol=1e-10, rtol=0)


def logits_in_two_passes(hf: PreTrainedModel) -> Tensor:
    """Return the logits of a sequence: the second half is a pass after the first one in the cache."""
    model = Model(hf)
    return torch.cat(
        [
            model.score(prefilled(model, {0: TOKENS[:start]}), chain([TOKENS[start:stop]]), Needs()).require_logits()[0]
            for start, stop in ((0, 5), (5, 11))
        ]
    )


# Refused


def test_an_unknown_family_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ModelUnsupported, match=f"'bloom'.*supported: {', '.join(sorted(FAMILIES))}"):
        family_of(AutoConfig.for_model("bloom"))


@pytest.mark.parametrize(
    "kind", ["deepseek_v3", "granitemoeshared", "gemma3", "qwen3_next", "qwen2_vl", "mamba2", "gemma4_text"]
)
def test_similar_families_are_refused(kind: str) -> None:
    """Experts, linear attention, images: other layers under a similar name."""
    with pytest.raises(ModelUnsupported, match=f"'{kind}': .*; supported: "):
        family_of(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_angles_that_depend_on_the_length_are_refused(kind: str) -> None:
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelUnsupported, match=f"'{kind}'.*llama3"):
        family_of(config)


def test_an_unknown_position_scheme_is_refused() -> None:
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(ModelUnsupported, match="'spiral' is not supported.*supported: default, linear, llama3, yarn"):
        family_of(config)


def test_one_rotary_table_that_depends_on_the_length_is_refused() -> None:
    config = Gemma3TextConfig()
    config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelUnsupported, match="gemma3_text.*'dynamic'"):
        family_of(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Qwen3Config(num_hidden_layers=1, layer_types=["chunked_attention"]), "qwen3.*chunked_attention.*full_attention"),
        (Qwen3Config(num_hidden_layers=1, layer_types=["sliding_attention"]), "qwen3.*sliding_window is None"),
        (LlamaConfig(num_hidden_layers=1, layer_types=["sliding_attention"]), "llama.*sliding_attention"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "gemma3_text.*use_bidirectional_attention"),
        (Gemma2Config(use_bidirectional_attention=True), "gemma2.*use_bidirectional_attention"),
    ],
)
def test_unsupported_layers_are_refused(config: Any, named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        family_of(config)


@pytest.mark.parametrize(
    ("family", "chosen", "count"), [("mixtral", 9, 8), ("mixtral", 0, 8), ("granitemoe", None, 8), ("granitemoe", 2, None)]
)
def test_a_row_uses_some_of_the_experts(family: str, chosen: int | None, count: int | None) -> None:
    config = AutoConfig.for_model(family)
    config.num_experts_per_tok, config.num_local_experts = chosen, count
    with pytest.raises(ModelUnsupported, match=f"{family}: a row is to use {chosen} experts of {count}"):
        family_of(config)


OBSTACLES = {
    "qwen3_next": "recurrent",
    "mamba2": "recurrent",
    "lfm2": "recurrent",
    "falcon_h1": "recurrent",
    "deepseek_v3": "latent .*kv_lora_rank.*; that needs a cache of latents",
    "deepseek_v32": "latent.*choose the keys",
    "llama4_text": "chunked_attention",
    "gemma4_text": "different heads",
    "gemma3n_text": "share keys.*inputs of their own",
    "bloom": "foreword try FOLDER",
    "bart": "encoder and a decoder",
    "gemma3": "images.*its text model is 'gemma3_text', which is supported",
    "t5": "encoder and a decoder",
    "vit": "images|no causal",
    "olmo": "foreword try FOLDER",
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_an_unknown_family_is_told_what_differs(kind: str) -> None:
    with pytest.raises(ModelUnsupported, match=f"{kind!r}: .*({OBSTACLES[kind]}).*; supported: "):
        family_of(AutoConfig.for_model(kind))


def test_alibi_is_an_obstacle() -> None:
    assert [str(one) for one in obstacles(FalconConfig(alibi=True))] == [
        "scores depend on distance (ALiBi); that needs that slope in attention"
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_family_has_no_obstacle(family: str) -> None:
    assert not obstacles(AutoConfig.for_model(family))


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("opt", {"do_layer_norm_before": False}, "norms come after the halves"),
        ("opt", {"word_embed_proj_dim": 512, "hidden_size": 1024}, "embeddings are 512 wide and its rows 1024"),
        ("gpt2", {"add_cross_attention": True}, "attend to an encoder"),
    ],
)
def test_variants_with_other_parts_are_refused(kind: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelUnsupported, match=rf"{kind}: .*{said}.*slow=True"):
        family_of(AutoConfig.for_model(kind, **fields))


def test_halves_in_a_row_need_no_line_of_their_own() -> None:
    """A GPT-NeoX may have its halves one after the other."""
    hf = fresh("gpt_neox", torch.float32, use_parallel_residual=False)
    assert try_family(hf, FAMILIES["gpt_neox"]).agrees


def test_padding_beyond_the_last_learned_position() -> None:
    """A prompt chunk may be padded beyond the context: its rows count for nothing, and must not fail."""
    hf = fresh("gpt2", torch.float32)
    rows, table = torch.zeros(1, 1, 32), hf.transformer.wpe.weight
    placed = FAMILIES["gpt2"].placed(hf, rows, torch.tensor([[len(table) + 5]]))
    assert torch.equal(placed[0, 0], table[-1])


def test_a_window_may_be_none() -> None:
    assert family_of(MistralConfig(sliding_window=None)).name == "mistral"
    model = Model(fresh("mistral", sliding_window=None))
    assert {spec.window for spec in model.layer_stack.attention_specs} == {0}
