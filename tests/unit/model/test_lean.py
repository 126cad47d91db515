"""Lean layers give what the packed layers of transformers give: any tree, any slots, grafts, taps, the same cache."""

import copy

import pytest
import torch

from doubles import EVERY_FAMILY, VOCABULARY, chain, fresh, random_tree
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, Needs
from foreword.core.state import Lanes
from foreword.model import lean
from foreword.model.model import Model
from foreword.model.pack import pack

LEAN = ("llama", "mistral", "qwen2", "qwen3")
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}


@pytest.fixture(params=LEAN)
def models(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """The same weights as transformers has them, and packed."""
    stock = fresh(request.param, torch.float32, **BIASED.get(request.param, {}))
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
    for model in models:  # a text longer than the windows
        model.score(lanes, chain([list(range(3, 12))] * 2), Needs())
        model.cache.advance(lanes, torch.tensor([9, 9]))
    for rows in (9, 1, 3, 12):
        tokens = torch.randint(0, VOCABULARY, (2, rows), generator=generator)
        draft = Draft(tokens, random_tree(2, rows, generator), torch.full((2,), rows))
        stock, lean = (model.score(lanes, draft, Needs(hidden=True, taps=(0, 2))) for model in models)
        close(lean.require_logits(), stock.require_logits())
        close(lean.taps[2], stock.taps[2])
        for model in models:
            model.cache.keep(lanes, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    for layer in range(4):
        for one, other in zip(models[0].cache.read(layer, lanes, 13), models[1].cache.read(layer, lanes, 13), strict=True):
            close(other, one)


@torch.inference_mode()
def test_grafts_are_the_same(models: tuple[Model, Model]) -> None:
    graft = Graft(1, (0, 2, 2), (1, 1, 2), lambda real, _: real[:, [0, 2, 2]] * 0.5)
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), Tree.of((0, 0, 1, 1)), torch.tensor([4]))
    stock, lean = (model.score(Lanes.of([1], 0), draft, Needs(grafts=(graft,))) for model in models)
    close(lean.require_logits(), stock.require_logits())
    assert lean.grafted is not None and stock.grafted is not None
    close(lean.grafted, stock.grafted)


@pytest.mark.parametrize("family", [family for family in EVERY_FAMILY if family not in LEAN])
def test_other_families_keep_their_layers(family: str) -> None:
    """What lies in them besides would be lost: layers without positions, factors, norms behind the halves, caps."""
    packed = fresh(family, torch.float32)
    pack(packed)
    assert Model(packed).layer_stack.lean is None


def test_another_activation_keeps_its_layers() -> None:
    packed = fresh("llama", torch.float32, hidden_act="gelu")
    pack(packed)
    assert Model(packed).layer_stack.lean is None


def test_norms_of_another_width_keep_their_layers() -> None:
    """On q and k, a norm over all heads is not one over each."""
    packed = fresh("qwen3", torch.float32)
    for layer in packed.model.layers:
        layer.self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(64))
    pack(packed)
    assert Model(packed).layer_stack.lean is None


@torch.inference_mode()
def test_without_numba_the_layers_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "find_spec", lambda _: None)
    packed = fresh("llama", torch.float32)
    pack(packed)
    model = Model(packed)
    model.allocate(1, 80, 20)
    assert model.layer_stack.lean is None
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), Tree.of((0, 0, 1, 1)), torch.tensor([4]))
    stock = Model(fresh("llama", torch.float32))
    stock.allocate(1, 80, 20)
    lanes = Lanes.of([0], 0)
    close(model.score(lanes, draft, Needs()).require_logits(), stock.score(lanes, draft, Needs()).require_logits())
