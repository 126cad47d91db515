"""A drafter's own stack: new layers of the target's kind with a cache of their own, run over accepted rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from doubles import EVERY_FAMILY, RUN_ONCE, fresh, target
from foreword.core.draft import Tree
from foreword.core.needs import Skip
from foreword.core.state import Batch
from foreword.errors import CapacityError
from foreword.model.model import Model
from foreword.model.stack import Rows, Stack

every_family = pytest.mark.parametrize("family", EVERY_FAMILY)
run_once = pytest.mark.parametrize("family", RUN_ONCE)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def model_with_room(family: str = "llama") -> Model:
    model = target(family)
    model.allocate(3, 64, 16)
    return model


def rows_after(stack: Stack, batch: Batch, nodes: int) -> Rows:
    assert stack.cache is not None
    tree = Tree.chain(nodes)
    return Rows(stack.cache.length[batch.slots], tree.depth, tree.ancestors, batch)


@every_family
@pytest.mark.parametrize("init", [0, 1])
@torch.no_grad()
def test_row_by_row_equals_all_at_once(init: int, family: str) -> None:
    """Two sequences get different numbers of rows per round, on slots that are not adjacent."""
    model = model_with_room(family)
    stack = model.stack(3, layers=2, init=init)
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0)).double()
    bare = Stack(model.hf, model.family, stack.layers)
    at_once = [
        bare.walk(hidden[index : index + 1], Rows(torch.tensor([0]), Tree.chain(9).depth, Tree.chain(9).ancestors)).hidden
        for index in range(2)
    ]
    pieces: list[list[Tensor]] = [[], []]
    done, batch = [0, 0], Batch.of([0, 2], 16)
    for counts in ([3, 1], [2, 4], [1, 0], [3, 4]):
        width = max(counts)
        part = torch.stack(
            [torch.nn.functional.pad(hidden[index], (0, 0, 0, 9))[done[index] :][:width] for index in range(2)]
        )
        walked = stack.walk(part, rows_after(stack, batch, width)).hidden
        assert stack.cache is not None
        stack.cache.advance(batch, torch.tensor(counts))
        for index, count in enumerate(counts):
            pieces[index].append(walked[index, :count])
            done[index] += count
    for index in range(2):
        close(torch.cat(pieces[index]), at_once[index][0])


@every_family
@torch.no_grad()
def test_rows_that_were_rewound_are_forgotten(family: str) -> None:
    model = model_with_room(family)
    stack, batch = model.stack(3, init=0), Batch.of([1], 16)
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0)).double()
    assert stack.cache is not None
    stack.walk(hidden[:, :3], rows_after(stack, batch, 3))
    stack.cache.advance(batch, torch.tensor([3]))
    expected = stack.walk(hidden[:, 3:], rows_after(stack, batch, 3)).hidden
    stack.walk(-hidden, rows_after(stack, batch, 6))
    stack.cache.advance(batch, torch.tensor([6]))
    stack.cache.rewind(batch, torch.tensor([3]))
    close(stack.walk(hidden[:, 3:], rows_after(stack, batch, 3)).hidden, expected)


@run_once
@torch.no_grad()
def test_a_copied_layer_computes_the_same_and_is_independent(family: str) -> None:
    """On the target's rows a copy computes what the layer does. Changing the copy does not change the target."""
    model = model_with_room(family)
    stack = model.stack(3, layers=2, init=2)
    hidden = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0)).double()
    where = Rows(torch.tensor([0]), Tree.chain(9).depth, Tree.chain(9).ancestors)
    bare = Stack(model.hf, model.family, stack.layers)
    whole = Stack(model.hf, model.family, model.layer_stack.layers)
    close(bare.walk(hidden, where, stop=1).hidden, whole.walk(hidden, where, start=2, stop=3).hidden)
    before = model.hf.model.layers[2].mlp.down_proj.weight.clone()
    for parameter in stack.parameters():
        parameter.zero_()
    assert torch.equal(model.hf.model.layers[2].mlp.down_proj.weight, before) and before.abs().sum() > 0


@torch.no_grad()
def test_a_range_copies_one_layer_each() -> None:
    model = model_with_room()
    own = [layer.mlp.down_proj.weight for layer in model.hf.model.layers]
    copies = [layer.mlp.down_proj.weight for layer in model.stack(3, layers=2, init=range(1, 3)).layers]
    assert all(torch.equal(copy, weight) and copy is not weight for copy, weight in zip(copies, own[1:3], strict=True))
    with pytest.raises(AssertionError, match="a layer for each"):
        model.stack(3, layers=3, init=range(2))


@every_family
def test_new_layers_differ_from_the_model_s(family: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """And from one another, also if the model came from a file: transformers marks its weights as initialised."""
    fresh(family, torch.float32).save_pretrained(tmp_path)
    for hf in (fresh(family, torch.float32), AutoModelForCausalLM.from_pretrained(tmp_path)):
        model = Model(hf)
        model.allocate(1, 64, 4)
        layers = model.stack(1, layers=2).layers
        weights = [layer.mlp.down_proj.weight for layer in (*layers, *hf.model.layers)]
        assert all(not torch.equal(one, other) for i, one in enumerate(weights) for other in weights[:i])
        neutral = torch.zeros(32) if family.startswith("gemma") else torch.ones(32)
        assert torch.equal(layers[0].post_attention_layernorm.weight, neutral)
        assert 0.2 < float(layers[0].mlp.down_proj.weight.detach().std()) < 0.4


@torch.no_grad()
def test_a_layer_without_an_mlp_can_be_left_out_too() -> None:
    stack = model_with_room().stack(3, layers=2, init=range(1, 3), mlp=False)
    rows = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0)).double()
    last = Stack(stack.model, stack.family, stack.layers[1:])
    close(stack.walk_sequences(rows, skip=Skip.of(attention=(0,))), last.walk_sequences(rows))


def test_a_stack_has_its_own_cache() -> None:
    model = model_with_room()
    stack = model.stack(2, layers=2, init=0, scratch=9)
    assert stack.cache is not None and stack.cache is not model.cache
    assert (stack.cache.slots, stack.cache.context) == (2, 64) and stack.cache.rows > 64 + 9
    assert len(stack.cache.keys) == 2


def test_rows_attend_to_later_ones_only_if_not_causal() -> None:
    """The kernel reads no later row in a causal pass. A mask excludes the same, so that a CPU computes what a GPU does."""
    model = model_with_room()
    stack = model.stack(3, init=0)
    assert stack.cache is not None
    both_ways, chain = torch.ones(1, 4, 4, dtype=torch.bool), Tree.chain(4)
    rows = Rows(stack.cache.length[:1], chain.depth, both_ways, Batch.of([0], 16))
    hidden = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0)).double()
    ordered, mutual = stack.walk(hidden, rows).hidden, stack.walk(hidden, replace(rows, causal=False)).hidden
    close(ordered, stack.walk(hidden, replace(rows, sees=chain.ancestors)).hidden)
    assert not torch.allclose(ordered[:, :3], mutual[:, :3])
    close(ordered[:, 3:], mutual[:, 3:])  # the last row attends to the same four either way, after one layer


def test_a_tree_with_more_rows_than_the_scratch_is_refused() -> None:
    stack = model_with_room().stack(1, 1, init=0, scratch=4)
    assert stack.cache is not None
    tree = Tree.forked(5, torch.device("cpu"))
    rows = Rows(stack.cache.length[:1], tree.depth, tree.ancestors, Batch.of([0], 0))
    with pytest.raises(CapacityError, match="5 draft rows"):
        stack.walk(torch.zeros(1, 5, stack.model.config.hidden_size, dtype=stack.model.dtype), rows)
