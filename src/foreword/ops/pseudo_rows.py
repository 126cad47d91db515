"""Pseudo rows, as torch operations: a matrix predicts a later token's hidden row from an earlier token's.

In: rows of a pass and the rows that a step starts from, each [b, n, H], and the weights of the step. Out: the rows of the
pass with the step's rows after them. On CUDA, ops/drafting/pseudo_rows.py takes the place of `with_pseudo_rows` in half
precision, and ops/drafting/carry.py that of `carried_on`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated
from foreword.ops.rows import rms_of, unit_rms

HALF = (torch.bfloat16, torch.float16)


def projected(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None, sized: bool) -> Tensor:
    """Return h + |h| (W h / |h| + b), where |h| is the row's root mean square; without `sized`, h + W h + b.

    rows [.., H]. weights: W as one matrix or several, in the order that rows go through them.
    """
    product = unit_rms(rows) if sized else rows
    for weight in weights[:-1]:
        product = functional.linear(product, weight)
    product = functional.linear(product, weights[-1], bias)
    return rows + (rms_of(rows) * product).to(rows.dtype) if sized else rows + product


def _is_half_without_gradients(rows: Tensor, source: Tensor, *others: Any) -> bool:
    return source.dtype in HALF and not torch.is_grad_enabled()


@accelerated("drafting.pseudo_rows:with_pseudo_rows", when=_is_half_without_gradients)
def with_pseudo_rows(
    rows: Tensor, source: Tensor, which: Tensor, weights: Sequence[Tensor], bias: Tensor | None, sized: bool
) -> Tensor:
    """Append to rows [b, n, H] those `projected` from rows `which` [R] of the source [b, m, H]: [b, n + R, H].

    NaN and infinities become 0. Real rows do not attend to pseudo rows, but a masked value is multiplied by 0, and 0 x NaN
    is NaN.
    """
    step = projected(source[:, which], weights, bias, sized)
    return torch.cat([rows, step.nan_to_num(0.0, 0.0, 0.0)], dim=1)


@accelerated("drafting.carry:carried_on")
def carried_on(
    states: Tensor, have: Tensor, slots: Tensor, path: Tensor, count: Tensor, rows: Tensor, where: Tensor, carries: Tensor
) -> None:
    """Keep the pseudo rows that the last accepted node of each sequence carried. Keep the old ones if it decided none.

    states [B, steps, H] and have [B], how many of them count: written at `slots` [b]. path [b, D + 1], count [b]: the
    accepted nodes. rows [b, R, H]: all pseudo rows. where [nodes, steps]: which of them belong to each node. carries
    [nodes]: how many steps each node carries.
    """
    decided = count > 0
    last = path.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    place = where[last].unsqueeze(-1).expand(-1, -1, states.shape[2])
    kept = rows.gather(1, place).where(decided.view(-1, 1, 1), states[slots])
    states.index_copy_(0, slots, kept)
    have.index_copy_(0, slots, carries[last].where(decided, have[slots]))
