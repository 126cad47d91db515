"""Rows brought to a drafter's own products, and kept from one round to the next: gathered, at one size, in one launch.

In: rows of the pass or of the level before, or what slots hold; where in them to look; and a table of embeddings. Out: new
rows. What is computed stands, as torch operations, in ops/rows.py, ops/slots.py and methods/clover2.py. A program
has one row of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.linear import Norm
from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.rounds import Columns

_TINY = tl.constexpr(1e-12)  # as in ops/rows.py


@triton.jit
def _at_one(x, K: tl.constexpr):
    """A row brought to a root mean square of 1, and what that was."""
    square = tl.sum(x * x, 0) / K
    return x * tl.rsqrt(square + _TINY), tl.sqrt(square)


@triton.jit
def _take(held, slots, out, columns, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """A stretch of what one slot holds."""
    take_turn(EARLY)
    seq, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(held + tl.load(slots + seq) * columns + at, mask=at < columns)
    tl.store(out + seq * columns + at, found, mask=at < columns)


def at_slots(held: Tensor, slots: Tensor) -> Tensor:
    """Of what all slots hold, [B, ..], that of some [b]: [b, ..]."""
    assert held.is_contiguous()
    out, columns = held.new_empty(slots.shape[0], *held.shape[1:]), held.numel() // held.shape[0]
    block = min(1024, triton.next_power_of_2(columns))
    _take[(slots.shape[0], triton.cdiv(columns, block))](
        held, slots, out, columns, BLOCK=block, **launched(held.device, block // 256)
    )
    return out


@triton.jit
def _put_embedded(table, tokens, out, place, at, K: tl.constexpr):
    """The embedding of the token at one place, at one."""
    x = tl.load(table + tl.load(tokens + place) * K + at, mask=at < K, other=0.0).to(tl.float32)
    tl.store(out + place * K + at, _at_one(x, K)[0].to(out.dtype.element_ty), mask=at < K)


@triton.jit
def _carry(
    known, origin, table, tokens, states, embeddings, live, count, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """The state of the node that one hangs on, or the embedding of its own token."""
    take_turn(EARLY)
    row, seq, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    here, place = at < K, seq * count + row
    if tl.program_id(2) == 0:
        state = tl.load(known + (seq * live + tl.load(origin + place)) * K + at, mask=here)
        tl.store(states + place * K + at, state, mask=here)
    else:
        _put_embedded(table, tokens, embeddings, place, at, K)


def carried_and_embedded(known: Tensor, origin: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `origin` [b, w] of `known` [b, n, H], and those `tokens` [b, w] of a table [V, H], at one: each [b, w, H]."""
    (batch, live, k), count = known.shape, tokens.shape[1]
    assert known.is_contiguous() and table.is_contiguous()
    states, embeddings = torch.empty(2, batch, count, k, dtype=known.dtype, device=known.device)
    block = triton.next_power_of_2(k)
    _carry[(count, batch, 2)](
        known, origin.contiguous(), table, tokens.contiguous(), states, embeddings, live, count,
        K=k, BLOCK=block, **launched(known.device, min(8, block // 256)),
    )  # fmt: skip
    return states, embeddings


@triton.jit
def _embed(table, tokens, out, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """The embedding of one token."""
    take_turn(EARLY)
    _put_embedded(table, tokens, out, tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), K)


def embedded_at_one(table: Tensor, tokens: Tensor) -> Tensor:
    """`embedded_at_one` of ops/rows.py, for tokens [b]."""
    assert table.is_contiguous()
    (count,), k = tokens.shape, table.shape[1]
    out, block = table.new_empty(count, k), triton.next_power_of_2(k)
    _embed[(count,)](table, tokens.contiguous(), out, K=k, BLOCK=block, **launched(table.device, min(8, block // 256)))
    return out


@triton.jit
def _count(
    rows, path, count, out, each, K: tl.constexpr, PATHED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """One row, or 0 where it does not count."""
    take_turn(EARLY)
    row, seq, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    place, counts = seq * tl.num_programs(0) + row, row < tl.load(count + seq)
    chosen = seq * each + (tl.load(path + place, mask=counts, other=0) if PATHED else row)
    found = tl.load(rows + chosen * K + at, mask=(at < K) & counts, other=0.0)
    tl.store(out + place * K + at, found, mask=at < K)


def counted(rows: Tensor, count: Tensor, path: Tensor | None = None) -> Tensor:
    """`counted` of ops/rows.py."""
    (batch, each, k), wanted = rows.shape, rows.shape[1] if path is None else path.shape[1]
    out, block = rows.new_empty(batch, wanted, k), triton.next_power_of_2(k)
    _count[(wanted, batch)](
        rows.contiguous(), count if path is None else path.contiguous(), count.contiguous(), out, each,
        K=k, PATHED=path is not None, BLOCK=block, **launched(rows.device, min(8, block // 256)),
    )  # fmt: skip
    return out


@triton.jit
def _tell(
    sources, path, count, table, tokens, slots, cached, taps, both, sizes, rows, context, t_slot,
    K: tl.constexpr, TAPS: tl.constexpr, PATHED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """What the target held of a row after one of its layers, 0 where the row does not count; or the token behind it."""
    take_turn(EARLY)
    row, seq, source, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2), tl.arange(0, BLOCK)
    here, place = at < K, seq * tl.num_programs(0) + row
    goal = tl.where(source < TAPS, taps + (place * TAPS + source) * K, both + place * K)
    if source <= TAPS:
        counts = row < tl.load(count + seq)
        chosen = seq * rows + (tl.load(path + place, mask=counts, other=0) if PATHED else row)
        x = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(TAPS + 1):
            x += tl.load(sources[i] + chosen * K + at, mask=here & counts & (source == i), other=0.0).to(tl.float32)
    else:
        slot = tl.load(slots + seq)
        column = tl.minimum(tl.load(cached + slot) + 1 + row, context - 1)
        x = tl.load(table + tl.load(tokens + slot * t_slot + column) * K + at, mask=here, other=0.0).to(tl.float32)
        goal += tl.num_programs(0) * tl.num_programs(1).to(tl.int64) * K
    x, size = _at_one(x, K)
    tl.store(goal + at, x.to(both.dtype.element_ty), mask=here)
    tl.store(sizes + place, size.to(sizes.dtype.element_ty), mask=source == TAPS)


def told(
    hidden: Tensor,
    taps: Sequence[Tensor],
    path: Tensor | None,
    count: Tensor,
    table: Tensor,
    state: Columns,
    cached: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of rows [b, N, H], and of taps of the same, those along a `path` [b, n] or all, 0 past the first `count` [b]; and the
    embeddings by a table [V, H] of the tokens behind the `cached` [B] ones. All at one: taps side by side [b, n, T H], rows
    and embeddings [b, n, H], and how large the rows were, [b, n, 1]."""
    (batch, rows, k), wanted = hidden.shape, hidden.shape[1] if path is None else path.shape[1]
    ready = hidden.new_empty(batch, wanted, len(taps) * k)
    both, sizes = hidden.new_empty(2, batch, wanted, k), hidden.new_empty(batch, wanted, 1)
    block = triton.next_power_of_2(k)
    _tell[(wanted, batch, len(taps) + 2)](
        tuple(part.contiguous() for part in (*taps, hidden)), count if path is None else path.contiguous(),
        count.contiguous(),
        table, state.tokens, state.slots, cached, ready, both, sizes, rows, state.tokens.shape[1], state.tokens.stride(0),
        K=k, TAPS=len(taps), PATHED=path is not None, BLOCK=block, **launched(hidden.device, min(8, block // 256)),
    )  # fmt: skip
    return ready, both[0], both[1], sizes


@triton.jit
def _remember(
    rows, path, count, slots, weight, held, each, places, epsilon,
    K: tl.constexpr, PATHED: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Of one sequence the last row that counts."""
    at = tl.arange(0, BLOCK)
    here = at < K
    factor = tl.load(weight + at, mask=here, other=0.0).to(tl.float32) if NORMED else 1.0
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    last = tl.load(count + seq) - 1
    there = here & (last >= 0)
    row = tl.load(path + seq * places + last, mask=last >= 0, other=0) if PATHED else last
    x = tl.load(rows + (seq * each + row) * K + at, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        x *= factor * tl.rsqrt(tl.sum(x * x, 0) / K + epsilon)
    tl.store(held + tl.load(slots + seq) * K + at, x.to(held.dtype.element_ty), mask=there)


def remember(
    held: Tensor, slots: Tensor, rows: Tensor, count: Tensor, path: Tensor | None = None, norm: Norm | None = None
) -> None:
    """`remember` of ops/rows.py."""
    batch, each, k = rows.shape
    block, (weight, epsilon) = triton.next_power_of_2(k), (rows, 0.0) if norm is None else norm
    assert held.is_contiguous() and held.shape[1] == k
    _remember[(batch,)](
        rows.contiguous(), count if path is None else path.contiguous(), count.contiguous(), slots, weight, held,
        each, 0 if path is None else path.shape[1], epsilon,
        K=k, PATHED=path is not None, NORMED=norm is not None, BLOCK=block, **launched(held.device, min(8, block // 256)),
    )  # fmt: skip
