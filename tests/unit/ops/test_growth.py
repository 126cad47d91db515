"""Trees grown by kernels, against the torch bodies in ops/growth.py, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from foreword.core.draft import Shape
from foreword.drafting.trees import BestFirst, Budgeted
from rounds import check_filled_template, check_growth, check_paths

SHAPES = [(Shape(2, 1), 1, 1), (Shape(7, 3), 3, 4), (Shape(64, 5), 8, 10), (Shape(30, 2), 9, 6), (Shape(6, 5), 2, 1)]


@pytest.mark.parametrize(("shape", "width", "branch"), SHAPES, ids=str)
def test_the_likeliest_nodes_are_drafted(shape: Shape, width: int, branch: int) -> None:
    for seed in range(6):
        check_growth(seed, "cpu", BestFirst(shape, width, branch, None))


@pytest.mark.parametrize(("top_p", "floor"), [(0.8, 0.25), (1.0, 0.0)])
@pytest.mark.parametrize(("shape", "width", "branch"), SHAPES, ids=str)
def test_the_budget_is_spent_level_by_level(shape: Shape, width: int, branch: int, top_p: float, floor: float) -> None:
    for seed in range(4):
        check_growth(seed, "cpu", Budgeted(shape, width, branch, None, top_p=top_p, floor=floor))


@pytest.mark.parametrize("kind", ["static", "best"])
@pytest.mark.parametrize("nodes", [1, 6, 40])
def test_the_likeliest_paths_that_the_steps_reach(nodes: int, kind: str) -> None:
    for seed in range(8):
        check_paths(seed, "cpu", kind, nodes)


@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_a_template_is_filled(nodes: int) -> None:
    for seed in range(8):
        check_filled_template(seed, "cpu", nodes)
