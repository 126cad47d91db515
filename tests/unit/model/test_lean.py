"""Lean layers give what the packed layers of transformers give: any tree, any slots, grafts, taps, the same cache."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from doubles import random_tree
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, Needs
from foreword.core.state import Lanes
from foreword.model import lean
from foreword.model.model import Model
from foreword.model.pack import pack

SHAPE = dict(
    vocab_size=60,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
)


def made(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)).eval()
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)).eval()
    for layer in model.model.layers:  # norms that do something
        torch.nn.init.uniform_(layer.self_attn.q_norm.weight, 0.5, 2)
        torch.nn.init.uniform_(layer.self_attn.k_norm.weight, 0.5, 2)
    return model


@pytest.fixture(params=["llama", "qwen3"])
def models(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """The same weights as transformers has them, and packed."""
    stock = made(request.param)
    packed = copy.deepcopy(stock)
    pack(packed)
    both = Model(stock), Model(packed)
    for model in both:
        model.allocate(3, 80, 20)
    assert both[0].layer_stack.lean is None and both[1].layer_stack.lean is not None
    return both


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("seats", [[0, 1], [2, 0]], ids=["side by side", "apart"])
def test_rounds_are_the_same(models: tuple[Model, Model], seats: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    lanes = Lanes.of(seats, 40)
    for rows in (9, 1, 3, 12):
        tokens = torch.randint(0, 60, (2, rows), generator=generator)
        draft = Draft(tokens, random_tree(2, rows, generator), torch.full((2,), rows))
        stock, lean = (model.score(lanes, draft, Needs(hidden=True, taps=(0, 2))) for model in models)
        close(lean.require_logits(), stock.require_logits())
        close(lean.taps[2], stock.taps[2])
        for model in models:
            model.cache.keep(lanes, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    for layer in range(3):
        for one, other in zip(models[0].cache.read(layer, lanes, 4), models[1].cache.read(layer, lanes, 4), strict=True):
            close(other, one)


@torch.inference_mode()
def test_grafts_are_the_same(models: tuple[Model, Model]) -> None:
    graft = Graft(1, (0, 2, 2), (1, 1, 2), lambda real, _: real[:, [0, 2, 2]] * 0.5)
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), Tree.of((0, 0, 1, 1)), torch.tensor([4]))
    stock, lean = (model.score(Lanes.of([1], 0), draft, Needs(grafts=(graft,))) for model in models)
    close(lean.require_logits(), stock.require_logits())
    assert lean.grafted is not None and stock.grafted is not None
    close(lean.grafted, stock.grafted)


@torch.inference_mode()
def test_without_numba_the_layers_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "find_spec", lambda _: None)
    packed = made("llama")
    pack(packed)
    model = Model(packed)
    model.allocate(1, 80, 20)
    assert model.layer_stack.lean is None
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), Tree.of((0, 0, 1, 1)), torch.tensor([4]))
    stock = Model(made("llama"))
    stock.allocate(1, 80, 20)
    lanes = Lanes.of([0], 0)
    close(model.score(lanes, draft, Needs()).require_logits(), stock.score(lanes, draft, Needs()).require_logits())
