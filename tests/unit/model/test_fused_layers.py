"""Lean layers give what the layers of transformers give: any tree, any slots, grafts, taps, the same cache.

Those for CUDA run here through Triton's interpreter; tests/gpu has them in half precision.
"""

import copy
from collections.abc import Callable
from itertools import product as product_of

import pytest
import torch
from torch import nn

from doubles import EVERY_FAMILY, VOCABULARY, chain, fresh, random_tree
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, Join, Needs, Skip
from foreword.core.state import Batch
from foreword.model import linears as pack_module
from foreword.model.fused import cuda as lean_cuda
from foreword.model.fused import layers as lean
from foreword.model.fused.cpu import KEPT_ROWS, CpuLayer
from foreword.model.fused.cuda import CudaLayer
from foreword.model.linears import MAX_STOCK_ROWS, JointLinear, fuse, pack
from foreword.model.model import Model
from foreword.model.stack import Rows
from foreword.ops.layer import linear as kernel

LEAN = ("llama", "mistral", "qwen2", "qwen3")
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}


CASES = {
    **{family: (family, pack, CpuLayer) for family in LEAN},
    **{f"{family} for CUDA": (family, fuse, CudaLayer) for family in ("mistral", "qwen3")},
    **{f"{family} for CUDA, large": (family, fuse, CudaLayer) for family in ("llama", "qwen3")},
    "llama for CUDA, many rows": ("llama", fuse, CudaLayer),
}
# On a CPU slots that lie side by side are a view; kernels ask for the number of every one.
SEATED = [(case, seats) for case in CASES for seats in ([2, 0], [0, 1]) if "CUDA" not in case or seats == [2, 0]]


@pytest.fixture
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Model]:
    """The same weights as transformers has them, and rebuilt."""
    family, rebuild, kind = CASES[request.param]
    if request.param.endswith("large"):
        monkeypatch.setattr(lean_cuda, "LARGE", 0)
    elif request.param.endswith("rows"):
        monkeypatch.setattr(lean_cuda, "FEW_ROWS", 4)
    layers = 2 if kind is CudaLayer else 4  # Triton's interpreter is slow; two hand on to one another
    stock = fresh(family, torch.float32, **BIASED.get(family, {}), head_dim=16, num_hidden_layers=layers)
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
@pytest.mark.parametrize(("models", "seats"), SEATED, indirect=["models"])
def test_rounds_are_the_same(models: tuple[Model, Model], seats: list[int]) -> None:
    fused = isinstance(models[1].layer_stack.layers[0].self_attn.q_proj.fusion.linear, JointLinear)
    generator = torch.Generator().manual_seed(1)
    batch = Batch.of(seats, 40)
    for model in models:  # a text longer than the windows
        model.score(batch, chain([list(range(3, 12))] * 2), Needs())
        model.cache.advance(batch, torch.tensor([9, 9]))
    for rows in (1, 5) if fused else (9, 1, 3, 12):  # Triton's interpreter is slow
        tokens = torch.randint(0, VOCABULARY, (2, rows), generator=generator)
        draft = Draft(tokens, random_tree(2, rows, generator), torch.full((2,), rows))
        stock, lean = (model.score(batch, draft, Needs(hidden=True, taps=(0, 2))) for model in models)
        close(lean.require_logits(), stock.require_logits())
        close(lean.taps[2], stock.taps[2])
        for model in models:
            model.cache.keep(batch, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    for layer in range(models[0].layers):
        caches = [model.cache for model in models]
        for one, other in ([cache.keys[layer] for cache in caches], [cache.values[layer] for cache in caches]):
            close(other[batch.slots, :, :11], one[batch.slots, :, :11])


@torch.inference_mode()
def test_prompts_of_any_length_leave_no_buffers() -> None:
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
    """Every length of a prompt, any number of sequences: one set of buffers, as long as the longest pass, and few numbers of
    rows that oneDNN compiles a product for."""
    compiled: set[int] = set()
    product = pack_module._packed_product
    monkeypatch.setattr(pack_module, "_packed_product", lambda rows, *more: compiled.add(len(rows)) or product(rows, *more))
    packed = fresh("llama", torch.float32, num_hidden_layers=1, max_position_embeddings=300)
    pack(packed)
    model = Model(packed)
    model.allocate(4, 256, 256)
    (layer,) = model.layer_stack.fused or ()
    assert isinstance(layer, CpuLayer)
    for count in range(1, 257):
        model.score(Batch.of([0], 0), chain([[5] * count]), Needs(), logits="none")
    seen, held = len(compiled), {name: buffer.array for name, buffer in layer.memory.prompts.items()}
    assert seen <= 80
    for batch, count in product_of((2, 4), (1, 9, 17, 33, 50, 64)):
        model.score(Batch.of(list(range(batch)), 0), chain([[5] * count] * batch), Needs(), logits="none")
    assert len(compiled) == seen and all(layer.memory.prompts[name].array is array for name, array in held.items())
    rows = sum(linear.columns_in for linear in (layer.qkv, layer.out, layer.down)) + layer.q_size
    stock = MAX_STOCK_ROWS * sum(linear.columns_out for linear in (layer.qkv, layer.out, layer.gate_up))
    numbers = sum(len(buffer.array) for one in (layer.memory.rounds, layer.memory.prompts) for buffer in one.values())
    assert numbers == (KEPT_ROWS + 256) * rows + stock


@torch.inference_mode()
@pytest.mark.parametrize(("sequences", "count"), [(1, 33), (1, 75), (2, 17), (3, 23), (40, 1)])
def test_rows_after_those_of_a_pass_change_nothing(sequences: int, count: int) -> None:
    """Those that fill up a number of rows hold what an earlier pass left, which may be NaN."""
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
        for held in (layer.memory.rounds, layer.memory.prompts):
            for buffer in held.values():
                buffer.array.fill(float("nan"))


@torch.inference_mode()
@pytest.mark.parametrize("models", CASES, indirect=True)
def test_grafts_are_the_same(models: tuple[Model, Model]) -> None:
    graft = Graft.of(1, (0, 2, 2), (1, 1, 2), lambda real, _: real[:, [0, 2, 2]] * 0.5)
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), Tree.of((0, 0, 1, 1)), torch.tensor([4]))
    stock, lean = (model.score(Batch.of([1], 0), draft, Needs(grafts=(graft,))) for model in models)
    close(lean.require_logits(), stock.require_logits())
    assert lean.grafted is not None and stock.grafted is not None
    close(lean.grafted, stock.grafted)


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
    ids=["tapped", "grafted", "a layer less", "half a layer less"],
)
def test_norms_are_handed_on_from_layer_to_layer(
    needs: Needs, skip: Skip | None, launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm is launched for the first layer, and where a layer gets other rows than the one before it made."""
    norms: list[int] = []
    alone = kernel._normed
    monkeypatch.setattr(kernel, "_normed", lambda rows, *rest: norms.append(len(rows)) or alone(rows, *rest))
    stock, fused = (fresh("mistral", torch.float32, head_dim=16) for _ in range(2))
    fuse(fused)
    both = Model(stock), Model(fused)
    draft = Draft(torch.tensor([[5, 6, 7, 8, 9, 4]]), Tree.of((0, 0, 1, 1, 2, 4)), torch.tensor([6]))
    for model in both:
        model.allocate(1, 40, 10)
    for _ in range(2):  # the second time over what the first has left behind
        norms.clear()
        one, other = (model.score(Batch.of([0], 0), draft, needs, skip=skip) for model in both)
        close(other.require_logits(), one.require_logits())
        for layer, tap in other.taps.items():
            close(tap, one.taps[layer])
        assert len(norms) == launched


@torch.inference_mode()
def test_a_walk_uses_nothing_that_another_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with the very rows that the other one ended with: a product asks where rows stand before its turn, so that
    the norm has to be launched between."""
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
@pytest.mark.parametrize("family", [family for family in EVERY_FAMILY if family not in LEAN])
def test_other_families_keep_their_layers(family: str, rebuild: Callable[[nn.Module], None]) -> None:
    """What lies in them besides would be lost: layers without positions, factors, norms behind the halves, caps."""
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
    """On q and k, a norm over all heads is not one over each."""
    packed = fresh("qwen3", torch.float32)
    for layer in packed.model.layers:
        layer.self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(64))
    pack(packed)
    assert Model(packed).layer_stack.fused is None


@torch.inference_mode()
def test_without_numba_the_layers_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "find_spec", lambda _: None)
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
def test_whole_texts_are_the_same(family: str) -> None:
    """As training reads them: no cache, no mask, and on CUDA no layer of transformers."""
    stock = fresh(family, torch.float32, **BIASED[family], head_dim=16)
    rebuilt = copy.deepcopy(stock)
    fuse(rebuilt)
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    one, other = (Model(model).read(tokens, Needs(hidden=True, taps=(0, 2))) for model in (stock, rebuilt))
    close(other.require_hidden(), one.require_hidden())
    close(other.taps[2], one.taps[2])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_beside_whole_texts_are_the_same(family: str) -> None:
    """The texts go by lean layers, which leave keys and values for the rows beside them; those carry gradients."""
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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_of_a_drafter_are_lean_where_the_target_s_are(family: str) -> None:
    """Copies lie together in memory: lean layers read them as one product, and see what is loaded into them later."""
    hf = fresh(family, torch.float32, **BIASED[family], head_dim=16)
    stock = Model(copy.deepcopy(hf)).stack(2, 2, init=1)
    fuse(hf)
    own = Model(hf).stack(2, 2, init=1)
    assert stock.fused is None and {type(layer) for layer in own.fused or ()} == {CudaLayer}
    changed = {name: torch.randn_like(value) * 0.1 for name, value in stock.layers.state_dict().items()}
    rows, batch, count = torch.randn(1, 3, 32), Batch.of([1], 0), torch.tensor([3])
    answers = []
    for stack in (stock, own):
        stack.layers.load_state_dict(changed)
        with torch.inference_mode():
            answers.append(stack.read(rows, batch, count))
    close(answers[1], answers[0])


def test_layers_that_were_widened_one_by_one_are_not_lean() -> None:
    """In training they are float32, each weight by itself, and their gradients are wanted."""
    hf = fresh("llama", torch.float32, head_dim=16)
    fuse(hf)
    stack = Model(hf).stack(1, 1, init=0)
    stack.layers.to(torch.float64)
    assert lean.fused_layers(stack.layers) is None
    rows = torch.randn(1, 3, 32)
    stack.layers.to(torch.float32)
    stack.walk_sequences(rows).sum().backward()
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in stack.parameters())
