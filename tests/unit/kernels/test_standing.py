"""Where rows stand, by a kernel, against the stack's own operations, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from doubles import random_tree, target
from foreword.core.needs import Graft
from foreword.core.state import Lanes
from foreword.model.stack import Rows
from rounds import check_standing, same


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(1, 1), (3, 3), (4, 9)])
def test_rows_stand_where_the_stack_says(count: int, scratch: int, shared: bool) -> None:
    for seed in range(4):
        check_standing(seed, "cpu", count, scratch, shared)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(4, 4), (4, 9)])
def test_grafted_rows_stand_behind_their_anchors(count: int, scratch: int, shared: bool) -> None:
    """Some nodes carry several rows, of one graft and of both, and one carries none."""
    grafts = [
        Graft.of(1, (0, 3, 3), (1, 1, 2), lambda real, _: real),
        Graft.of(2, (3, 1, 0), (3, 1, 2), lambda real, _: real),
    ]
    for seed in range(4):
        check_standing(seed, "cpu", count, scratch, shared, grafts[: 1 + seed % 2])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_layers_share_what_the_kernel_says(family: str) -> None:
    """With windows and several rotary tables too: what each number of rows gets is what torch operations give it."""
    stack, tree = target(family, dtype=torch.float32).layer_stack, random_tree(2, 5, torch.Generator().manual_seed(3))
    stack.allocate(4, 40, 16)
    rows = Rows(torch.tensor([30, 7]), tree.depth, tree.ancestors, Lanes.of([3, 1], 30))
    grafts = (Graft.of(1, (0, 4, 4), (1, 1, 2), lambda real, _: real), Graft.of(3, (4, 2), (3, 1), lambda real, _: real))
    found, exact = stack._views_by_kernel(rows, grafts, (5, 8)), stack._views(rows, grafts, (5, 8), torch.float32)
    for one, other in zip(found.values(), exact.values(), strict=True):
        assert all(same(getattr(one.shared, name), getattr(other.shared, name)) for name in ("depth", "sees", "places"))
        assert all(same(one.seen[window], seen) for window, seen in other.seen.items())
        for name, turned in other.tables.items():
            assert all(map(same, one.tables[name], turned))
