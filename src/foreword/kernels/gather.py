"""Rows brought to a drafter's own products, and kept from one round to the next: gathered, at one size, in one launch.

In: rows of the pass or of the level before, where in them to look, and a table of embeddings. Out: new rows, each beside the
others that its product reads. What is computed stands, as torch operations, in core/heads.py and methods/clover2.py. A
program has one row of one kind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.overlap import launched, take_turn

_TINY = tl.constexpr(1e-12)  # as in core/heads.py


@triton.jit
def _at_one(x, K: tl.constexpr):
    """A row brought to a root mean square of 1, and what that was."""
    square = tl.sum(x * x, 0) / K
    return x * tl.rsqrt(square + _TINY), tl.sqrt(square)


@triton.jit
def _carry(
    known, origin, table, tokens, states, embeddings, live, count, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """The state of the node that one hangs on, or the embedding of its own token."""
    take_turn(EARLY)
    row, lane, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    here, place = at < K, lane * count + row
    if tl.program_id(2) == 0:
        state = tl.load(known + (lane * live + tl.load(origin + place)) * K + at, mask=here)
        tl.store(states + place * K + at, state, mask=here)
    else:
        x = tl.load(table + tl.load(tokens + place) * K + at, mask=here, other=0.0).to(tl.float32)
        tl.store(embeddings + place * K + at, _at_one(x, K)[0].to(embeddings.dtype.element_ty), mask=here)


def carried_and_embedded(known: Tensor, origin: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `origin` [b, w] of `known` [b, n, H], and those `tokens` [b, w] of a table [V, H], at one: each [b, w, H]."""
    (lanes, live, k), count = known.shape, tokens.shape[1]
    assert known.is_contiguous() and table.is_contiguous()
    states, embeddings = torch.empty(2, lanes, count, k, dtype=known.dtype, device=known.device)
    block = triton.next_power_of_2(k)
    _carry[(count, lanes, 2)](
        known, origin.contiguous(), table, tokens.contiguous(), states, embeddings, live, count,
        K=k, BLOCK=block, **launched(known.device, min(8, block // 256)),
    )  # fmt: skip
    return states, embeddings
