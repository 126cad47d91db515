"""Append a step of pseudo rows to a pass: a matrix product over all source rows, then one launch that gathers and stores.

In: rows [b, n, H] of a pass, source rows [b, m, H], often the same, and the weights of a step. Out: [b, n + R, H], the first
n unchanged. h + |h| (W h / |h| + b) is computed as h + W h + |h| b, so that nothing precedes the product. A product over
all source rows costs less than a launch that gathers the needed ones first. The torch reference is in ops/pseudo_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from foreword.ops.layer.linear import few_rows_linear
from foreword.ops.layer.overlap import launched, take_turn

FEW_ROWS = 128
SMALL = 2**22  # weights in a matrix; torch reads larger ones faster


@triton.jit
def _append_pseudo_rows(
    rows, source, product, which, bias, out, before, sources,
    H: tl.constexpr, BIASED: tl.constexpr, SIZED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Write one row of one sequence: a copy, or a new row. NaN and infinities become 0."""
    take_turn(EARLY)
    row, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    wide = tl.arange(0, BLOCK)
    here = wide < H
    to_row = out + (seq * tl.num_programs(0) + row) * H + wide
    if row < before:
        tl.store(to_row, tl.load(rows + (seq * before + row) * H + wide, mask=here), mask=here)
    else:
        origin = (seq * sources + tl.load(which + row - before)) * H + wide
        state = tl.load(source + origin, mask=here, other=0.0).to(tl.float32)
        value = state + tl.load(product + origin, mask=here, other=0.0).to(tl.float32)
        if BIASED:
            added = tl.load(bias + wide, mask=here, other=0.0).to(tl.float32)
            value += added * tl.sqrt(tl.sum(state * state, 0) / H) if SIZED else added
        rounded = value.to(out.dtype.element_ty)
        finite = tl.abs(rounded.to(tl.float32)) < float("inf")
        tl.store(to_row, tl.where(finite, rounded, 0.0), mask=here)


def with_pseudo_rows(
    rows: Tensor, source: Tensor, which: Tensor, weights: Sequence[Tensor], bias: Tensor | None, sized: bool
) -> Tensor:
    """`with_pseudo_rows` of ops/pseudo_rows.py."""
    product, source = source.contiguous(), source.contiguous()
    for weight in weights:
        few = product.numel() <= FEW_ROWS * product.shape[-1] and weight.numel() <= SMALL
        product = few_rows_linear(product, weight) if few else linear(product, weight)
    (batch, before, size), block = rows.shape, triton.next_power_of_2(rows.shape[2])
    out = torch.empty(batch, before + len(which), size, dtype=rows.dtype, device=rows.device)
    _append_pseudo_rows[(out.shape[1], batch)](
        rows.contiguous(), source, product, which, product if bias is None else bias, out, before, source.shape[1],
        H=size, BIASED=bias is not None, SIZED=sized, BLOCK=block, **launched(rows.device, min(8, block // 256)),
    )  # fmt: skip
    return out
