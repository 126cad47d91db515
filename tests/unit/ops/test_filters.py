"""Filters as kernels against those of torch, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.ops.filters import Filters
from foreword.ops.round.filters import STRETCH, filtered
from rounds import check_filtered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("seed", "rows", "width"), [(0, 1, 40), (1, 2, STRETCH), (2, 1, STRETCH + 5), (3, 3, 2 * STRETCH - 9)]
)
def test_they_keep_what_those_of_torch_keep(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    check_filtered(seed, rows, width, dtype, "cpu")


def test_equal_scores_survive_together() -> None:
    scores = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    one = torch.ones(1)
    by_count = filtered(scores, one, Filters(top_k=torch.tensor([2]), largest_k=2))
    by_mass = filtered(scores, one, Filters(top_p=torch.tensor([0.6])))
    for kept in (by_count, by_mass):
        assert (kept > -torch.inf).tolist() == [[[True, True, True, True, False]]]


def test_a_row_without_any_probability_keeps_nothing_else() -> None:
    """One token is left by a mask; the filters must not bring others back."""
    scores = torch.full((1, 1, 50), -torch.inf)
    scores[0, 0, 31] = -1e30
    kept = filtered(scores, torch.ones(1), Filters(torch.tensor([4]), 4, torch.tensor([0.5]), torch.tensor([0.1])))
    assert torch.equal(kept, scores)


def test_no_rows() -> None:
    assert filtered(torch.zeros(0, 3, 50), torch.zeros(0), Filters(top_p=torch.zeros(0))).shape == (0, 3, 50)
