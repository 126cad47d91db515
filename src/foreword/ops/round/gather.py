"""Kernels that gather the rows a drafter reads and keeps between rounds; each gathers and normalises in one launch.

In: rows of the pass or of the previous level, or one entry per slot; indices into them; and a table of embeddings. Out: new
rows. The torch references are in ops/rows.py, ops/slots.py and ops/embeddings.py. A program handles one row from one source.
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
def _unit_rms(x, K: tl.constexpr):
    """Return a row normalised to a root mean square of 1, and the root mean square it had."""
    mean_square = tl.sum(x * x, 0) / K
    return x * tl.rsqrt(mean_square + _TINY), tl.sqrt(mean_square)


@triton.jit
def _copy_entry(column, slots, out, columns, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Copy BLOCK columns of one slot's entry."""
    take_turn(EARLY)
    seq, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(column + tl.load(slots + seq) * columns + index, mask=index < columns)
    tl.store(out + seq * columns + index, found, mask=index < columns)


def at_slots(column: Tensor, slots: Tensor) -> Tensor:
    """Return entries `slots` [b] of a column [B, ..]: [b, ..]."""
    assert column.is_contiguous()
    out, columns = column.new_empty(slots.shape[0], *column.shape[1:]), column.numel() // column.shape[0]
    block = min(1024, triton.next_power_of_2(columns))
    _copy_entry[(slots.shape[0], triton.cdiv(columns, block))](
        column, slots, out, columns, BLOCK=block, **launched(column.device, block // 256)
    )
    return out


@triton.jit
def _store_embedding(table, tokens, out, place, at, K: tl.constexpr):
    """Store the embedding of the token at one place, normalised to a root mean square of 1."""
    x = tl.load(table + tl.load(tokens + place) * K + at, mask=at < K, other=0.0).to(tl.float32)
    tl.store(out + place * K + at, _unit_rms(x, K)[0].to(out.dtype.element_ty), mask=at < K)


@triton.jit
def _carry(
    known, origin, table, tokens, states, embeddings, live, count, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Copy the state of a node's parent, or store the embedding of its own token."""
    take_turn(EARLY)
    row, seq, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    inside, place = at < K, seq * count + row
    if tl.program_id(2) == 0:
        state = tl.load(known + (seq * live + tl.load(origin + place)) * K + at, mask=inside)
        tl.store(states + place * K + at, state, mask=inside)
    else:
        _store_embedding(table, tokens, embeddings, place, at, K)


def carried_and_embedded(known: Tensor, origin: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`carried_and_embedded` of ops/rows.py: rows `origin` [b, w] of `known` [b, n, H], and normalised embeddings of tokens
    [b, w] from a table [V, H]. Each is [b, w, H]."""
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
    """Store the normalised embedding of one token."""
    take_turn(EARLY)
    _store_embedding(table, tokens, out, tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), K)


def unit_rms_embeddings(table: Tensor, tokens: Tensor) -> Tensor:
    """`unit_rms_embeddings` of ops/rows.py, for tokens [b]."""
    assert table.is_contiguous()
    (count,), k = tokens.shape, table.shape[1]
    out, block = table.new_empty(count, k), triton.next_power_of_2(k)
    _embed[(count,)](table, tokens.contiguous(), out, K=k, BLOCK=block, **launched(table.device, min(8, block // 256)))
    return out


@triton.jit
def _count(
    rows, path, count, out, source_rows, K: tl.constexpr, PATHED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Copy one row, or write 0 past the first `count`."""
    take_turn(EARLY)
    row, seq, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    place, counts = seq * tl.num_programs(0) + row, row < tl.load(count + seq)
    chosen = seq * source_rows + (tl.load(path + place, mask=counts, other=0) if PATHED else row)
    found = tl.load(rows + chosen * K + at, mask=(at < K) & counts, other=0.0)
    tl.store(out + place * K + at, found, mask=at < K)


def counted(rows: Tensor, count: Tensor, path: Tensor | None = None) -> Tensor:
    """`counted` of ops/rows.py."""
    (batch, source_rows, k), places = rows.shape, rows.shape[1] if path is None else path.shape[1]
    out, block = rows.new_empty(batch, places, k), triton.next_power_of_2(k)
    _count[(places, batch)](
        rows.contiguous(), count if path is None else path.contiguous(), count.contiguous(), out, source_rows,
        K=k, PATHED=path is not None, BLOCK=block, **launched(rows.device, min(8, block // 256)),
    )  # fmt: skip
    return out


@triton.jit
def _condition(
    sources, path, count, table, tokens, slots, cached, taps, outputs, sizes, rows, context, t_slot,
    K: tl.constexpr, TAPS: tl.constexpr, PATHED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise one row of a tap or of the last layer, 0 past the first `count`; or the embedding of the token after it.

    `source` (the third program id): the taps are 0 to TAPS - 1, the hidden rows TAPS, and the embeddings TAPS + 1."""
    take_turn(EARLY)
    row, seq, source, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2), tl.arange(0, BLOCK)
    inside, place = at < K, seq * tl.num_programs(0) + row
    destination = tl.where(source < TAPS, taps + (place * TAPS + source) * K, outputs + place * K)
    if source <= TAPS:
        counts = row < tl.load(count + seq)
        chosen = seq * rows + (tl.load(path + place, mask=counts, other=0) if PATHED else row)
        x = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(TAPS + 1):
            x += tl.load(sources[i] + chosen * K + at, mask=inside & counts & (source == i), other=0.0).to(tl.float32)
    else:
        slot = tl.load(slots + seq)
        column = tl.minimum(tl.load(cached + slot) + 1 + row, context - 1)
        x = tl.load(table + tl.load(tokens + slot * t_slot + column) * K + at, mask=inside, other=0.0).to(tl.float32)
        destination += tl.num_programs(0) * tl.num_programs(1).to(tl.int64) * K
    x, rms = _unit_rms(x, K)
    tl.store(destination + at, x.to(outputs.dtype.element_ty), mask=inside)
    tl.store(sizes + place, rms.to(sizes.dtype.element_ty), mask=source == TAPS)


def conditioned_on_next(
    hidden: Tensor,
    taps: Sequence[Tensor],
    path: Tensor | None,
    count: Tensor,
    table: Tensor,
    state: Columns,
    cached: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`conditioned_on_next` of ops/rows.py.

    Takes rows `hidden` [b, N, H] and taps of the same shape, along a `path` [b, n] or all of them, with 0 past the first
    `count` [b]; and embeddings, from a table [V, H], of the tokens after the `cached` [B] ones. Returns concatenated taps
    [b, n, T H], rows and embeddings [b, n, H], all normalised to a root mean square of 1, and the root mean square that the
    rows had [b, n, 1]."""
    (batch, rows, k), places = hidden.shape, hidden.shape[1] if path is None else path.shape[1]
    lower = hidden.new_empty(batch, places, len(taps) * k)
    outputs, sizes = hidden.new_empty(2, batch, places, k), hidden.new_empty(batch, places, 1)
    block = triton.next_power_of_2(k)
    _condition[(places, batch, len(taps) + 2)](
        tuple(given.contiguous() for given in (*taps, hidden)), count if path is None else path.contiguous(),
        count.contiguous(),
        table, state.tokens, state.slots, cached, lower, outputs, sizes, rows, state.tokens.shape[1], state.tokens.stride(0),
        K=k, TAPS=len(taps), PATHED=path is not None, BLOCK=block, **launched(hidden.device, min(8, block // 256)),
    )  # fmt: skip
    return lower, outputs[0], outputs[1], sizes


@triton.jit
def _remember(
    rows, path, count, slots, weight, buffer, source_rows, places, epsilon,
    K: tl.constexpr, PATHED: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Store the last accepted row of one sequence."""
    at = tl.arange(0, BLOCK)
    inside = at < K
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) if NORMED else 1.0
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    last = tl.load(count + seq) - 1
    stored = inside & (last >= 0)
    row = tl.load(path + seq * places + last, mask=last >= 0, other=0) if PATHED else last
    x = tl.load(rows + (seq * source_rows + row) * K + at, mask=stored, other=0.0).to(tl.float32)
    if NORMED:
        x *= factor * tl.rsqrt(tl.sum(x * x, 0) / K + epsilon)
    tl.store(buffer + tl.load(slots + seq) * K + at, x.to(buffer.dtype.element_ty), mask=stored)


def remember(
    buffer: Tensor, slots: Tensor, rows: Tensor, count: Tensor, path: Tensor | None = None, norm: Norm | None = None
) -> None:
    """`remember` of ops/rows.py."""
    batch, source_rows, k = rows.shape
    block, (weight, epsilon) = triton.next_power_of_2(k), (rows, 0.0) if norm is None else norm
    assert buffer.is_contiguous() and buffer.shape[1] == k
    _remember[(batch,)](
        rows.contiguous(), count if path is None else path.contiguous(), count.contiguous(), slots, weight, buffer,
        source_rows, 0 if path is None else path.shape[1], epsilon,
        K=k, PATHED=path is not None, NORMED=norm is not None, BLOCK=block, **launched(buffer.device, min(8, block // 256)),
    )  # fmt: skip
