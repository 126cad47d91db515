"""The loss of draft heads over rows of logits, and its gradient, in one kernel.

In: logits [R, V], and what they should predict: a label per row, or a teacher's logits [R, V] with their `log_mass`. Out:
the loss and the label's rank per row; the gradient overwrites the logits. A program sweeps one row twice, once for its
logsumexp and once for the rest, in float32. No softmax is ever stored. The torch reference is in ops/losses.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 4096  # columns that a program holds at a time
WARPS = 8

_HUGE = tl.constexpr(3.0e38)


@triton.jit
def _mass_of(logits, width, BLOCK: tl.constexpr):
    """Return the logsumexp of one row, in one sweep. The sum is kept relative to the largest logit so far."""
    column = tl.arange(0, BLOCK)
    peak = -_HUGE  # finite, so that no difference of infinities is taken
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        value = tl.load(logits + first + column, mask=first + column < width, other=float("-inf")).to(tl.float32)
        higher = tl.minimum(tl.maximum(peak, tl.max(value, 0)), _HUGE)
        mass = mass * tl.exp(peak - higher) + tl.exp(value - higher)
        peak = higher
    return tl.log(tl.sum(mass, 0)) + peak


@triton.jit
def _log_mass(logits, masses, width, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    tl.store(masses + row, _mass_of(logits + row * width, width, BLOCK))


@triton.jit
def _cross_entropies(
    logits, labels, counts, teacher, teacher_mass, losses, ranks, width,
    SOFT: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    teacher += row * width
    column = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    counted = tl.load(counts + row) != 0
    at_label = tl.load(logits + label).to(tl.float32)  # read before the second sweep writes over it
    mass = _mass_of(logits, width, BLOCK)
    goal_mass = tl.load(teacher_mass + row) if SOFT else 0.0
    loss_terms = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        here = first + column < width
        value = tl.load(logits + first + column, mask=here, other=float("-inf")).to(tl.float32)
        larger += (value > at_label).to(tl.int32)
        if SOFT:
            goal_logit = tl.load(teacher + first + column, mask=here, other=float("-inf")).to(tl.float32)
            goal = tl.exp(goal_logit - goal_mass)
            loss_terms += goal * tl.where(goal == 0, 0.0, mass - value)  # a logit may be -inf, and 0 x inf is NaN
        else:
            goal = (first + column == label).to(tl.float32)
        if WITH_GRADIENT:
            gradient = tl.where(counted, tl.exp(value - mass) - goal, 0.0)
            tl.store(logits + first + column, gradient.to(logits.dtype.element_ty), mask=here)
    loss = tl.sum(loss_terms, 0) if SOFT else mass - at_label
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    tl.store(ranks + row, tl.sum(larger, 0))


def log_mass(logits: Tensor) -> Tensor:
    """`log_mass` of ops/losses.py."""
    assert logits.is_contiguous() and logits.dtype.itemsize <= 4
    rows, width = logits.shape
    masses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _log_mass[(rows,)](logits, masses, width, BLOCK=_block(width), num_warps=WARPS)
    return masses


def cross_entropies(
    logits: Tensor, labels: Tensor, counts: Tensor, teacher: tuple[Tensor, Tensor] | None, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """`cross_entropies` of ops/losses.py."""
    assert logits.is_contiguous() and logits.dtype.itemsize <= 4
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.long, device=logits.device)
    goal, mass = (logits, losses) if teacher is None else teacher
    assert goal.is_contiguous() and goal.shape == logits.shape
    if rows:
        _cross_entropies[(rows,)](
            logits, labels.contiguous(), counts.to(torch.uint8), goal, mass, losses, ranks, width,
            SOFT=teacher is not None, WITH_GRADIENT=with_gradient, BLOCK=_block(width), num_warps=WARPS,
        )  # fmt: skip
    if with_gradient:  # autograd does not see a kernel's writes; a new version makes it refuse to use logits that it saved
        torch.autograd.graph.increment_version(logits)
    return losses, ranks


def _block(width: int) -> int:
    return min(MOST, triton.next_power_of_2(width))
