"""The loss of draft heads over rows of logits, and its gradient, in one kernel.

In: logits [R, V], and as the wanted answer a label per row, or a teacher's logits [R, V] with their `log_mass`. Out: loss
and the label's rank per row, and in place of the logits their gradient. A program sweeps one row twice, once for its
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
    """The logsumexp of one row, in one sweep. The sum is kept relative to the largest logit so far."""
    column = tl.arange(0, BLOCK)
    peak = -_HUGE  # finite, so that infinities behave
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
def _lose(
    logits, labels, counts, taught, taught_mass, losses, places, width,
    SOFT: tl.constexpr, LEARNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    taught += row * width
    column = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    counted = tl.load(counts + row) != 0
    at_label = tl.load(logits + label).to(tl.float32)  # read before the second sweep writes over it
    mass = _mass_of(logits, width, BLOCK)
    wanted_mass = tl.load(taught_mass + row) if SOFT else 0.0
    lost = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        here = first + column < width
        value = tl.load(logits + first + column, mask=here, other=float("-inf")).to(tl.float32)
        larger += (value > at_label).to(tl.int32)
        if SOFT:
            own = tl.load(taught + first + column, mask=here, other=float("-inf")).to(tl.float32)
            wanted = tl.exp(own - wanted_mass)
            lost += wanted * tl.where(wanted == 0, 0.0, mass - value)  # what is not wanted may be impossible
        else:
            wanted = (first + column == label).to(tl.float32)
        if LEARNS:
            change = tl.where(counted, tl.exp(value - mass) - wanted, 0.0)
            tl.store(logits + first + column, change.to(logits.dtype.element_ty), mask=here)
    loss = tl.sum(lost, 0) if SOFT else mass - at_label
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    tl.store(places + row, tl.sum(larger, 0))


def log_mass(logits: Tensor) -> Tensor:
    """The logsumexp of each row of logits [R, V], in float32: [R]."""
    assert logits.is_contiguous() and logits.dtype.itemsize <= 4
    rows, width = logits.shape
    masses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _log_mass[(rows,)](logits, masses, width, BLOCK=_block(width), num_warps=WARPS)
    return masses


def lose(
    logits: Tensor, labels: Tensor, counts: Tensor, taught: tuple[Tensor, Tensor] | None, learns: bool
) -> tuple[Tensor, Tensor]:
    """`lose` of ops/losses.py."""
    assert logits.is_contiguous() and logits.dtype.itemsize <= 4
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, dtype=torch.long, device=logits.device)
    own, mass = (logits, losses) if taught is None else taught
    assert own.is_contiguous() and own.shape == logits.shape
    if rows:
        _lose[(rows,)](
            logits, labels.contiguous(), counts.to(torch.uint8), own, mass, losses, places, width,
            SOFT=taught is not None, LEARNS=learns, BLOCK=_block(width), num_warps=WARPS,
        )  # fmt: skip
    if learns:  # autograd does not see a kernel's writes; with a new version it refuses to use logits that it saved
        torch.autograd.graph.increment_version(logits)
    return losses, places


def _block(width: int) -> int:
    return min(MOST, triton.next_power_of_2(width))
