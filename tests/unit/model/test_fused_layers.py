"""Fused layers compute what the layers of transformers do: with any tree, slots, grafts and taps, and the same cache.

Those for CUDA run here in Triton's interpreter; tests/gpu has them in half precision.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product as product_of

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from doubles import EVERY_FAMILY, VOCABULARY, chain, fresh, one_rank, random_tree
from foreword.core.draft import Draft, Early, Tree
from foreword.core.needs import Graft, Join, Needs, Skip
from foreword.core.state import Batch
from foreword.model import linears as linears_module
from foreword.model.fused import cuda as fused_cuda
from foreword.model.fused import layers as fused_module
from foreword.model.fused.cpu import KEPT_ROWS, CpuLayer
from foreword.model.fused.cuda import CudaAttention, CudaLayer
from foreword.model.linears import MAX_STOCK_ROWS, JointLinear, fuse, pack
from foreword.model.model import Model
from foreword.model.sharding import take_over
from foreword.model.stack import Rows
from foreword.ops.layer import linear as kernel

FUSED = ("llama", "mistral", "qwen2", "qwen3", "foreword_looped")
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}
CHANGES = BIASED | {"foreword_looped": {"repeats": 2}}


def with_sums(rebuild: Callable[[PreTrainedModel], None]) -> Callable[[PreTrainedModel], None]:
    """Return a way to rebuild a model whose products are summed over ranks, of which there is one here."""

    def divided(model: PreTrainedModel) -> None:
        take_over(model, one_rank())
        rebuild(model)

    return divided


CASES = {
    **{family: (family, pack, CpuLayer) for family in FUSED},
    **{f"{family} for CUDA": (family, fuse, CudaLayer) for family in ("mistral", "qwen3")},
    **{f"{family} for CUDA, large": (family, fuse, CudaLayer) for family in ("llama", "qwen3")},
    "llama for CUDA, many rows": ("llama", fuse, CudaLayer),
    "llama with sums": ("llama", with_sums(pack), CpuLayer),
    "qwen3 for CUDA, with sums": ("qwen3", with_sums(fuse), CudaLayer),
    "llama for CUDA, with sums, large": ("llama", with_sums(fuse), CudaLayer),
}
# On a CPU adjacent slots are a view of the cache; kernels always get every slot's number.
WITH_SLOTS = [(case, slots) for case in CASES for slots in ([2, 0], [0, 1]) if "CUDA" not in case or slots == [2, 0]]
WITH_SLOTS.remove(("qwen3 for CUDA, with sums", [2, 0]))  # slow in the interpreter; its halves are tested


@pytest.fixture
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Model]:
    """Return the same weights as transformers has them, and rebuilt."""
    family, rebuild, kind = CASES[request.param]
    if request.param.endswith("large"):
        monkeypatch.setattr(fused_cuda, "LARGE", 0)
    elif request.param.endswith("rows"):
        monkeypatch.setattr(fused_cuda, "FEW_ROWS", 4)
    layers = 2 if kind is CudaLayer else 4  # Triton's interpreter is slow; two layers suffice to hand on a norm
    stock = fresh(family, torch.float32, **CHANGES.get(family, {}), head_dim=16, num_hidden_layers=layers)
    rebuilt = copy.deepcopy(stock)
    rebuild(rebuilt)
    both = Model(stock), Model(rebuilt)
    for model in both:
        model.allocate(3, 80, 20)
    assert both[0].layer_stack.fused is None
    assert {type(layer) for layer in both[1].layer_stack.fused or ()} == {kind}
    return both


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("models", "slots"), WITH_SLOTS, indirect=["models"])
def test_rounds_are_the_same(models: tuple[Model, Model], slots: list[int]) -> None:
    for_cuda = isinstance(models[1].layer_stack.layers[0].self_attn.q_proj.fusion.linear, JointLinear)
    generator = torch.Generator().manual_seed(1)
    batch = Batch.of(slots, 40)
    for model in models:  # a sequence longer than the windows
        model.score(batch, chain([list(range(3, 12))] * 2), Needs())
        model.cache.advance(batch, torch.tensor([9, 9]))
    for rows in (5, 1) if for_cuda else (9, 1, 3, 12):  # Triton's interpreter is slow
        tokens = torch.randint(0, VOCABULARY, (2, rows), generator=generator)
        draft = Draft(tokens, random_tree(2, rows, generator), torch.full((2,), rows))
        stock, fused = (model.score(batch, draft, Needs(hidden=True, taps=(0, 2))) for model in models)
        close(fused.require_logits(), stock.require_logits())
        close(fused.taps[2], stock.taps[2])
        for model in models:
            model.cache.keep(batch, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    for layer in range(models[0].layers):
        caches = [model.cache for model in models]
        for one, other in ([cache.keys[layer] for cache in caches], [cache.values[layer] for cache in caches]):
            close(other[batch.slots, :, :11], one[batch.slots, :, :11])


@torch.inference_mode()
@pytest.mark.parametrize("models", ["qwen2", "mistral for CUDA"], indirect=True)
def test_a_pass_that_begins_with_early_states_is_the_same(models: tuple[Model, Model]) -> None:
    """The first layers read the root and then the other rows; the pass runs the layers after them."""
    batch, layer = Batch.of([2, 0], 40), models[0].layers // 2
    tokens = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    draft = Draft(tokens, Tree.of((0, 0, 0, 1, 2)), torch.tensor([5, 5]))
    for model in models:
        model.score(batch, chain([[3, 4]] * 2), Needs())
        model.cache.advance(batch, torch.tensor([2, 2]))
    stock, fused = models
    rows = Rows(batch.take(fused.cache.length), draft.tree.depth, draft.tree.ancestors, batch)
    rest = replace(rows, sees=rows.sees[:, 1:])
    states = [fused.early(tokens[:, :1], rows.head(1), layer), fused.early(tokens[:, 1:], rest, layer)]
    found = fused.score(batch, replace(draft, early=Early(layer, torch.cat(states, 1))), Needs(taps=(layer,)))
    exact = stock.score(batch, draft, Needs(taps=(layer,)))
    close(found.require_logits(), exact.require_logits())
    close(found.taps[layer], exact.taps[layer])
    for one, other in zip([*stock.cache.keys, *stock.cache.values], [*fused.cache.keys, *fused.cache.values], strict=True):
        close(other[batch.slots, :, :7], one[batch.slots, :, :7])


@torch.inference_mode()
def test_only_workspaces_of_rounds_are_kept() -> None:
    packed = fresh("llama", torch.float32)
    pack(packed)
    model = Model(packed)
    model.allocate(1, 150, 8)
    for rows in (1, 4, 65, 90, 120):
        model.score(Batch.of([0], 0), chain([[5] * rows]), Needs())
    (layer, *_) = model.layer_stack.fused or ()
    assert isinstance(layer, CpuLayer) and set(layer.spaces) == {(1, 1), (1, 4)}


@torch.inference_mode()
def test_buffers_are_bounded_whatever_shapes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of every length, in any number of sequences, use one set of buffers, as large as the longest pass, and oneDNN
    compiles products for few row counts."""
    compiled: set[int] = set()
    product = linears_module._packed_product
    monkeypatch.setattr(
        linears_module, "_packed_product", lambda rows, *rest: compiled.add(len(rows)) or product(rows, *rest)
    )
    packed = fresh("llama", torch.float32, num_hidden_layers=1, max_position_embeddings=300)
    pack(packed)
    model = Model(packed)
    model.allocate(4, 256, 256)
    (layer,) = model.layer_stack.fused or ()
    assert isinstance(layer, CpuLayer)
    for count in range(1, 257):
        model.score(Batch.of([0], 0), chain([[5] * count]), Needs(), logits="none")
    products, arrays = len(compiled), {name: buffer.array for name, buffer in layer.memory.prompts.items()}
    assert products <= 80
    for batch, count in product_of((2, 4), (1, 9, 17, 33, 50, 64)):
        model.score(Batch.of(list(range(batch)), 0), chain([[5] * count] * batch), Needs(), logits="none")
    assert len(compiled) == products
    assert all(layer.memory.prompts[name].array is array for name, array in arrays.items())
    rows = sum(linear.columns_in for linear in (layer.qkv, layer.out, layer.down)) + layer.q_size
    stock = MAX_STOCK_ROWS * sum(linear.columns_out for linear in (layer.qkv, layer.out, layer.gate_up))
    numbers = sum(len(buffer.array) for one in (layer.memory.rounds, layer.memory.prompts) for buffer in one.values())
    assert numbers == (KEPT_ROWS + 256) * rows + stock


@torch.inference_mode()
@pytest.mark.parametrize(("sequences", "count"), [(1, 33), (1, 75), (2, 17), (3, 23), (40, 1)])
def test_padding_rows_change_nothing(sequences: int, count: int) -> None:
    """They hold what an earlier pass left, which may be NaN."""
    stock = fresh("llama", torch.float32)
    packed = copy.deepcopy(stock)
    pack(packed)
    both = Model(stock), Model(packed)
    tokens = torch.randint(3, VOCABULARY, (sequences, count), generator=torch.Generator().manual_seed(0)).tolist()
    for model in both:
        model.allocate(sequences, 80, 80)
    batch = Batch.of(list(range(sequences)), 0)
    for _ in range(2):
        one, other = (model.score(batch, chain(tokens), Needs()).require_logits() for model in both)
        close(other, one)
        (layer, *_) = both[1].layer_stack.fused or ()
        assert isinstance(layer, CpuLayer)
        for buffers in (layer.memory.rounds, layer.memory.prompts):
            for buffer in buffers.values():
                buffer.array.fill(float("nan"))


SKIPS = {"attention first": Skip.of((0,), (1,)), "mlp first": Skip.of((1,), (0,))}
# Triton's interpreter is slow: of two families whose layers are for CUDA alike, one begins with attention, one with the MLP.
APART = {"mistral for CUDA": 0, "qwen3 for CUDA": 1, "qwen3 for CUDA, large": 0, "llama for CUDA, large": 1}
WITH_SKIPS = [(case, skip) for case in CASES for place, skip in enumerate(SKIPS) if APART.get(case, place) == place]


@torch.inference_mode()
@pytest.mark.parametrize(("models", "skip"), WITH_SKIPS, indirect=["models"])
def test_half_layers_are_the_same(models: tuple[Model, Model], skip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft reads the root alone, then more rows; no layer of the rebuilt model runs as transformers wrote it."""
    for model in models:
        model.score(Batch.of([1], 0), chain([list(range(3, 12))]), Needs())
        model.cache.advance(Batch.of([1], 0), torch.tensor([9]))
    tokens, batch = torch.tensor([[5, 6, 7, 8, 9, 4]]), Batch.of([1], 9)
    draft = Draft(tokens, Tree.of((0, 0, 1, 1, 2, 4)), torch.tensor([6]))
    for rows in (range(1), range(1, 6)):
        stock = models[0].score(batch, draft, Needs(), skip=SKIPS[skip], rows=rows).require_logits()
        with monkeypatch.context() as patch:
            for name in ("attention_half", "mlp_half"):
                patch.setattr(type(models[1].family), name, lambda *_, **__: pytest.fail("not fused"))
            close(models[1].score(batch, draft, Needs(), skip=SKIPS[skip], rows=rows).require_logits(), stock)


@torch.inference_mode()
@pytest.mark.parametrize("models", CASES, indirect=True)
def test_grafts_are_the_same(models: tuple[Model, Model]) -> None:
    graft = Graft.of(1, (0, 2, 2), (1, 1, 2), lambda real, _: real[:, [0, 2, 2]] * 0.5)
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), Tree.of((0, 0, 1, 1)), torch.tensor([4]))
    stock, fused = (model.score(Batch.of([1], 0), draft, Needs(grafts=(graft,))) for model in models)
    close(fused.require_logits(), stock.require_logits())
    assert fused.grafted is not None and stock.grafted is not None
    close(fused.grafted, stock.grafted)


GRAFT = Graft.of(2, (0, 2), (1, 1), lambda real, _: real[:, [0, 2]] * 0.5)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("needs", "skip", "launched"),
    [
        (Needs(taps=(1, 2)), None, 1),
        (Needs(grafts=(GRAFT,)), None, 2),
        (Needs(), Skip.of((1,), (1,)), 2),
        (Needs(), Skip.of(mlp=(2,)), 2),
    ],
    ids=["tapped", "grafted", "a skipped layer", "a skipped half"],
)
def test_norms_are_handed_on_from_layer_to_layer(
    needs: Needs, skip: Skip | None, launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm is launched only for the first layer, and for a layer that does not get the rows of the one before it."""
    norms: list[int] = []
    alone = kernel._normed
    monkeypatch.setattr(kernel, "_normed", lambda rows, *rest: norms.append(len(rows)) or alone(rows, *rest))
    stock, fused = (fresh("mistral", torch.float32, head_dim=16) for _ in range(2))
    fuse(fused)
    both = Model(stock), Model(fused)
    draft = Draft(torch.tensor([[5, 6, 7, 8, 9, 4]]), Tree.of((0, 0, 1, 1, 2, 4)), torch.tensor([6]))
    for model in both:
        model.allocate(1, 40, 10)
    for _ in range(2):  # the second time with what the first one handed on
        norms.clear()
        one, other = (model.score(Batch.of([0], 0), draft, needs, skip=skip) for model in both)
        close(other.require_logits(), one.require_logits())
        for layer, tap in other.taps.items():
            close(tap, one.taps[layer])
        assert len(norms) == launched


@torch.inference_mode()
def test_a_walk_uses_nothing_that_another_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with the rows that the other one returned. A product reads positions before its turn, so a norm has to be
    launched between it and the kernel that computes them."""
    norms: list[int] = []
    alone = kernel._normed
    monkeypatch.setattr(kernel, "_normed", lambda rows, *rest: norms.append(len(rows)) or alone(rows, *rest))
    fused = fresh("mistral", torch.float32, head_dim=16)
    fuse(fused)
    model = Model(fused)
    model.allocate(1, 40, 10)
    batch, tree = Batch.of([0], 0), Tree.chain(4)
    rows, hidden = (
        Rows(batch.take(model.cache.length), tree.depth, tree.ancestors, batch),
        model.embed(torch.tensor([[5, 6, 7, 8]])),
    )
    whole = model.layer_stack.walk(hidden, rows).rows
    lower = model.layer_stack.walk(hidden, rows, stop=1).rows
    norms.clear()
    torch.testing.assert_close(model.layer_stack.walk(lower, rows, start=1).rows, whole)
    assert len(norms) == 1


@pytest.mark.parametrize("rebuild", [pack, fuse], ids=["packed", "fused"])
@pytest.mark.parametrize("family", [family for family in EVERY_FAMILY if family not in FUSED])
def test_other_families_keep_their_layers(family: str, rebuild: Callable[[nn.Module], None]) -> None:
    """Fused layers lack what they have: layers without positions, factors, norms after the halves, caps."""
    rebuilt = fresh(family, torch.float32)
    rebuild(rebuilt)
    assert Model(rebuilt).layer_stack.fused is None


def test_another_activation_keeps_its_layers() -> None:
    packed = fresh("llama", torch.float32, hidden_act="gelu")
    pack(packed)
    assert Model(packed).layer_stack.fused is None


def test_heads_too_narrow_for_the_kernel_keep_their_layers() -> None:
    fused = fresh("llama", torch.float32, head_dim=8)
    fuse(fused)
    assert Model(fused).layer_stack.fused is None


def test_norms_of_another_width_keep_their_layers() -> None:
    """A norm over all heads of q or k is not a norm over each head."""
    packed = fresh("qwen3", torch.float32)
    for layer in packed.model.layers:
        layer.self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(64))
    pack(packed)
    assert Model(packed).layer_stack.fused is None


@torch.inference_mode()
def test_without_numba_the_layers_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_module, "find_spec", lambda _: None)
    packed = fresh("llama", torch.float32)
    pack(packed)
    model = Model(packed)
    model.allocate(1, 80, 20)
    assert model.layer_stack.fused is None
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), Tree.of((0, 0, 1, 1)), torch.tensor([4]))
    stock = Model(fresh("llama", torch.float32))
    stock.allocate(1, 80, 20)
    batch = Batch.of([0], 0)
    close(model.score(batch, draft, Needs()).require_logits(), stock.score(batch, draft, Needs()).require_logits())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_whole_sequences_are_the_same(family: str) -> None:
    """As training reads them: without a cache or a mask, and on CUDA without layers of transformers."""
    stock = fresh(family, torch.float32, **BIASED[family], head_dim=16)
    rebuilt = copy.deepcopy(stock)
    fuse(rebuilt)
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    one, other = (Model(model).read(tokens, Needs(hidden=True, taps=(0, 2))) for model in (stock, rebuilt))
    close(other.require_hidden(), one.require_hidden())
    close(other.taps[2], one.taps[2])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_that_join_whole_sequences_are_the_same(family: str) -> None:
    """Fused layers run the sequences and leave keys and values for the joined rows, which carry gradients."""
    stock = fresh(family, torch.float32, **BIASED[family], head_dim=16).requires_grad_(False)
    rebuilt = copy.deepcopy(stock)
    fuse(rebuilt)
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for hf in (stock, rebuilt):
        matrix = torch.eye(32).requires_grad_()
        joins = [Join(1, 1, lambda rows, _, m=matrix: rows @ m), Join(2, 2, lambda rows, _, m=matrix: rows @ m, (0,))]
        last = list(Model(hf).alongside(hidden, 1, torch.tensor([[0, 4], [3, 8]]), joins))[-1]
        sum(one.sum() for one in last.rows).backward()
        found.append((last.sequences, *(one.detach() for one in last.rows), matrix.grad))
    for one, other in zip(*found, strict=True):
        close(other, one)


@torch.inference_mode()
@pytest.mark.parametrize("models", ["llama", "mistral for CUDA"], indirect=True)
def test_rows_that_attend_to_later_ones_are_the_same(models: tuple[Model, Model]) -> None:
    """A block whose rows attend to each other, after different numbers of cached rows, with more rows than a program of the
    kernel takes: see `Rows.causal`. As a tree, the same rows come out otherwise."""
    batch, generator, count = Batch.of([2, 0], 40), torch.Generator().manual_seed(1), 20
    hidden, sees = torch.randn(2, count, 32, generator=generator), torch.rand(2, count, count, generator=generator) < 0.5
    sees |= torch.eye(count, dtype=torch.bool)
    found = []
    for model in models:
        model.score(batch, chain([list(range(3, 12))] * 2), Needs())
        model.cache.advance(batch, torch.tensor([9, 4]))
        depth = torch.arange(count) // torch.tensor([[1], [2]])
        rows = Rows(batch.take(model.cache.length), depth, sees, batch, causal=False)
        found.append([model.layer_stack.walk(hidden, one).hidden for one in (rows, replace(rows, causal=True))])
    (stock, ordered), (fused, fused_ordered) = found
    close(fused, stock)
    close(fused_ordered, ordered)
    assert not torch.allclose(stock[:, 0], ordered[:, 0])


@pytest.mark.parametrize("few_rows", [256, 0], ids=["our products", "torch's products"])
@pytest.mark.parametrize(("mlp", "kind"), [(True, CudaLayer), (False, CudaAttention)], ids=["layers", "attention alone"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_of_a_drafter_are_fused_if_the_target_s_are(
    family: str, mlp: bool, kind: type, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied weights are adjacent in memory: fused layers read them as one product, also after other weights are loaded."""
    monkeypatch.setattr(fused_cuda, "FEW_ROWS", few_rows)
    hf = fresh(family, torch.float32, **BIASED[family], head_dim=16)
    stock = Model(copy.deepcopy(hf)).stack(2, 2, init=1, mlp=mlp)
    fuse(hf)
    own = Model(hf).stack(2, 2, init=1, mlp=mlp)
    assert stock.fused is None and {type(layer) for layer in own.fused or ()} == {kind}
    changed = {name: torch.randn_like(value) * 0.1 for name, value in stock.layers.state_dict().items()}
    rows, batch, count = torch.randn(1, 3, 32), Batch.of([1], 0), torch.tensor([3])
    results = []
    for stack in (stock, own):
        stack.layers.load_state_dict(changed)
        with torch.inference_mode():
            results.append(stack.read(rows, batch, count))
    close(results[1], results[0])


def test_layers_with_separate_weights_are_not_fused() -> None:
    """A cast to another dtype separates the weights, as in training, which needs the gradient of each."""
    hf = fresh("llama", torch.float32, head_dim=16)
    fuse(hf)
    stack = Model(hf).stack(1, 1, init=0)
    stack.layers.to(torch.float64)
    assert fused_module.fused_layers(stack.layers) is None
    rows = torch.randn(1, 3, 32)
    stack.layers.to(torch.float32)
    stack.walk_sequences(rows).sum().backward()
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in stack.parameters())
