"""Pseudo rows, as torch operations: a matrix predicts a later token's hidden row from an earlier token's.

In: rows of a pass and the rows that a step starts from, each [b, n, H], and the weights of the step. Out: the rows of the
pass with the step's rows after them. On CUDA, ops/drafting/ahead.py takes the place of `joined_ahead` in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated
from foreword.ops.rows import at_one, size_of

HALF = (torch.bfloat16, torch.float16)


def projected(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None, sized: bool) -> Tensor:
    """h + |h| (W h / |h| + b), where |h| is the row's root mean square; without `sized`, h + W h + b.

    rows [.., H]. weights: W as one matrix or several, in the order that rows go through them.
    """
    product = at_one(rows) if sized else rows
    for weight in weights[:-1]:
        product = functional.linear(product, weight)
    product = functional.linear(product, weights[-1], bias)
    return rows + (size_of(rows) * product).to(rows.dtype) if sized else rows + product


def _is_half_without_gradients(rows: Tensor, source: Tensor, *others: Any) -> bool:
    return source.dtype in HALF and not torch.is_grad_enabled()


@accelerated("drafting.ahead:joined_ahead", when=_is_half_without_gradients)
def joined_ahead(
    rows: Tensor, source: Tensor, which: Tensor, weights: Sequence[Tensor], bias: Tensor | None, sized: bool
) -> Tensor:
    """Rows [b, n, H] and, after them, a step's: `projected` from rows `which` [R] of the source [b, m, H]: [b, n + R, H].

    NaN and infinities become 0. Real rows do not see pseudo rows, but a masked value counts 0 times itself, and 0 x NaN is
    NaN.
    """
    made = projected(source[:, which], weights, bias, sized)
    return torch.cat([rows, made.nan_to_num(0.0, 0.0, 0.0)], dim=1)
