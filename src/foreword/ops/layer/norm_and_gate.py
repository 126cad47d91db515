"""Kernels between torch's products: RMSNorm, optionally after adding a residual, and the gate SiLU(gate) * up.

In: rows [count, K]. Out: new rows, and the sum with the residual, rounded to the stored dtype before the norm. Our own
products include these steps (ops/layer/linear.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn

GATED_AT_ONCE = 1024


@triton.jit
def _add_and_norm(
    rows, added, weight, total, out, epsilon,
    K: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add and normalise one row."""
    index = tl.arange(0, BLOCK)
    inside = index < K
    factor = tl.load(weight + index, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    take_turn(EARLY)
    place = tl.program_id(0).to(tl.int64) * K + index
    x = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + place, x.to(total.dtype.element_ty), mask=inside)
    factor *= tl.rsqrt(tl.sum(x * x, 0) / K + epsilon)
    tl.store(out + place, (x * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(both, out, columns, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Gate BLOCK columns of one row."""
    take_turn(EARLY)
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < columns
    gate = tl.load(both + row * 2 * columns + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * columns + columns + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + index, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def normed(rows: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """Return the RMSNorm of rows [count, K], given its weight and epsilon."""
    return _launch(rows.contiguous(), None, norm)[1]


def rms_normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_normed` of ops/norms.py: the same for rows [.., K] of any shape."""
    return normed(rows.reshape(-1, rows.shape[-1]), (weight, epsilon)).view(rows.shape)


def added_and_normed(rows: Tensor, added: Tensor, norm: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
    """Return the sum of both [count, K], and its RMSNorm."""
    return _launch(rows, added, norm)


def _launch(rows: Tensor, added: Tensor | None, norm: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
    (count, k), (weight, epsilon) = rows.shape, norm
    assert rows.is_contiguous() and (added is None or added.is_contiguous())
    out, total = torch.empty_like(rows), rows if added is None else torch.empty_like(rows)
    block = triton.next_power_of_2(k)
    _add_and_norm[(count,)](
        rows, rows if added is None else added, weight, total, out, epsilon,
        K=k, BLOCK=block, ADDED=added is not None, **launched(rows.device, min(8, block // 256)),
    )  # fmt: skip
    return total, out


def gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up of rows [count, 2 N], gate before up: [count, N]."""
    count, columns = both.shape[0], both.shape[1] // 2
    assert both.is_contiguous()
    out = torch.empty(count, columns, dtype=both.dtype, device=both.device)
    block = min(GATED_AT_ONCE, triton.next_power_of_2(columns))
    _gate[(count, triton.cdiv(columns, block))](both, out, columns, BLOCK=block, **launched(both.device, block // 256))
    return out
