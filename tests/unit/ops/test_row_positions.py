"""Positions of rows by a kernel, against the stack's torch operations, in Triton's interpreter."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from doubles import random_tree, target
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Graft, Needs
from foreword.core.state import Batch
from foreword.model.stack import Rows
from rounds import check_row_positions, same


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(1, 1), (3, 3), (4, 9)])
def test_rows_have_the_positions_that_the_stack_computes(count: int, scratch: int, shared: bool) -> None:
    for seed in range(4):
        check_row_positions(seed, "cpu", count, scratch, shared)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(4, 4), (4, 9)])
def test_grafted_rows_come_after_their_anchors(count: int, scratch: int, shared: bool) -> None:
    """Some nodes have several grafted rows, of one graft or of both, and one has none."""
    grafts = [
        Graft.of(1, (0, 3, 3), (1, 1, 2), lambda real, _: real),
        Graft.of(2, (3, 1, 0), (3, 1, 2), lambda real, _: real),
    ]
    for seed in range(4):
        check_row_positions(seed, "cpu", count, scratch, shared, grafts[: 1 + seed % 2])


def test_a_chain_is_recognised() -> None:
    """A prompt is a chain; a tree is not, nor is a chain with grafted rows."""
    stack, tree = target(dtype=torch.float32).layer_stack, random_tree(1, 5, torch.Generator().manual_seed(3))
    stack.allocate(4, 40, 16)
    batch, base = Batch.of([3], 30), torch.tensor([30])
    graft = Graft.of(1, (4,), (1,), lambda real, _: real)
    chain = Rows.chain_after(base, 5, batch)
    for rows, grafts, known in (
        (chain, (), True),
        (chain, (graft,), False),
        (Rows(base, tree.depth, tree.ancestors, batch), (), False),
    ):
        views = stack._views_by_kernel(rows, grafts, (5,) if not grafts else (5, 6))
        assert {view.shared.chain for view in views.values()} == {known}


@pytest.mark.parametrize("tree", [Tree.chain(4), Tree.of((0, 0, 0, 1))], ids=["chain", "tree"])
def test_a_pass_says_whether_its_draft_is_a_chain(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = target(), []
    model.allocate(1, 40, 8)
    walk = model.layer_stack.walk

    def watched(hidden: torch.Tensor, rows: Rows, *others: Any, **more: Any) -> Any:
        seen.append(rows.chain)
        return walk(hidden, rows, *others, **more)

    monkeypatch.setattr(model.layer_stack, "walk", watched)
    model.score(Batch.of([0], 0), Draft(torch.ones(1, 4, dtype=torch.long), tree, torch.tensor([4])), Needs())
    assert seen == [tree.is_chain]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_layers_share_what_the_kernel_computes(family: str) -> None:
    """Also with windows and several rotary tables: each number of rows gets what torch operations give it."""
    stack, tree = target(family, dtype=torch.float32).layer_stack, random_tree(2, 5, torch.Generator().manual_seed(3))
    stack.allocate(4, 40, 16)
    rows = Rows(torch.tensor([30, 7]), tree.depth, tree.ancestors, Batch.of([3, 1], 30))
    grafts = (Graft.of(1, (0, 4, 4), (1, 1, 2), lambda real, _: real), Graft.of(3, (4, 2), (3, 1), lambda real, _: real))
    found, exact = stack._views_by_kernel(rows, grafts, (5, 8)), stack._views(rows, grafts, (5, 8), torch.float32)
    for one, other in zip(found.values(), exact.values(), strict=True):
        assert all(same(getattr(one.shared, name), getattr(other.shared, name)) for name in ("depth", "sees", "places"))
        assert all(same(one.seen[window], seen) for window, seen in other.seen.items())
        for name, angles in other.rotary.items():
            assert all(map(same, one.rotary[name], angles))
