"""Cross-entropies of rows of logits, and their gradients, against torch in float64, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.ops.training.cross_entropy import cross_entropies, log_mass
from rounds import check_cross_entropies


def random_logits(seed: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["label", "teacher"])
@pytest.mark.parametrize(("rows", "width"), [(3, 1), (5, 48), (4, 8192), (6, 4097), (2, 9001)])
def test_it_is_the_cross_entropy(rows: int, width: int, soft: bool, dtype: torch.dtype) -> None:
    check_cross_entropies(
        random_logits(1, rows, width, dtype), random_logits(2, rows, width, dtype) if soft else None, "cpu"
    )


def test_impossible_tokens() -> None:
    """Logits of -inf: all of the first of two blocks, and half of the teacher's. Far from 0, so that the peak matters."""
    logits = random_logits(3, 4, 6000, torch.float32) - 200
    logits[:, :4096] = -torch.inf
    check_cross_entropies(logits, None, "cpu")
    teacher = random_logits(4, 4, 6000, torch.float32) + 200
    teacher[:, ::2] = -torch.inf
    check_cross_entropies(random_logits(5, 4, 6000, torch.float32), teacher, "cpu")


def test_tokens_impossible_for_both() -> None:
    """0 log 0 is 0, as if the vocabulary had no such tokens."""
    logits, teacher = random_logits(6, 3, 50, torch.float32), random_logits(7, 3, 50, torch.float32)
    logits[:, 20:] = teacher[:, 20:] = -torch.inf
    labels, counts = torch.tensor([1, 2, 3]), torch.tensor([True, True, True])
    short, short_teacher = (one[:, :20].clone() for one in (logits, teacher))
    found = cross_entropies(logits, labels, counts, (teacher, log_mass(teacher)), True)
    expected = cross_entropies(short, labels, counts, (short_teacher, log_mass(short_teacher)), True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits[:, :20], short)
    assert not logits[:, 20:].any()


def test_nan_shows_in_rows_that_count() -> None:
    logits = random_logits(8, 2, 5000, torch.bfloat16)
    logits[:, 4500] = torch.nan
    losses, _ = cross_entropies(logits, torch.tensor([1, 1]), torch.tensor([True, False]), None, True)
    assert losses[0].isnan() and logits[0].isnan().all() and losses[1] == 0 and not logits[1].any()


def test_no_rows() -> None:
    nothing = torch.empty(0, 7)
    losses, ranks = cross_entropies(nothing, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.bool), None, True)
    assert losses.shape == ranks.shape == log_mass(nothing).shape == (0,)


def test_autograd_refuses_logits_that_it_saved() -> None:
    """The gradient overwrites the logits, so autograd must not use those that it saved."""
    rows = torch.randn(2, 9, generator=torch.Generator().manual_seed(9), requires_grad=True)
    logits = rows.tanh()
    cross_entropies(logits.detach(), torch.tensor([1, 2]), torch.tensor([True, True]), None, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logits, rows, logits.detach())
