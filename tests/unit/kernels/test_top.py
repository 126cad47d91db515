"""The k best of a row against torch's stable sort, through Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.core.sampling import _MOST
from foreword.kernels.top import MOST, top
from rounds import check_top, scores_with_ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "k"), [(1, 1, 1), (3, 8, 8), (2, 40, 3), (3, 1030, 8), (17, 300, 16), (2, 2048, 1), (18, 4100, 4)]
)
def test_it_is_the_stable_sort(rows: int, width: int, k: int, dtype: torch.dtype) -> None:
    """Also where ties, NaN or infinities cross from one stretch into the next, and where a stretch has fewer than k."""
    check_top(scores_with_ties(width + k, rows, width, dtype), k, "cpu")


def test_chances_of_scores_far_from_zero() -> None:
    """A stretch without any chance beside one of very low scores."""
    scores = torch.full((1, 3000), -torch.inf)
    scores[0, 2500:] = -5000 + torch.rand(500, generator=torch.Generator().manual_seed(0))
    check_top(scores, 5, "cpu")
    check_top(scores + 9000, 5, "cpu")


def test_rows_keep_their_shape() -> None:
    scores = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    assert torch.equal(top(scores, 4), scores.topk(4).indices)
    assert torch.equal(top(scores[:, ::2, :50], 4), scores[:, ::2, :50].topk(4).indices)
    assert top(scores[:0], 4).shape == (0, 3, 4)


def test_sampling_asks_for_no_more_than_it_finds() -> None:
    assert _MOST == MOST
