"""The tokens in flight through a looped model as kernels: what a round runs, and where the tokens are after it.

ops/flights.py has the torch references, and the tests compare the two. As torch operations they would be fifty launches,
which take longer than the layers of a small model's group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.flights import Boarded, Flight, FlightColumns
from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.rounds import Columns, Decision

_NONE = tl.constexpr(-1)  # as in ops/flights.py


@triton.jit
def _board(
    known, repeats, slots, roots, lengths, alive, tokens, repeat, position, virtual, deciding, rows, most, per_repeat,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Prepare the rows of one sequence."""
    take_turn(EARLY)
    seq, row = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot, inside = tl.load(slots + seq), row < rows
    times = tl.load(repeats + slot * most + row, mask=inside, other=_NONE)
    holds = times != _NONE
    token = tl.load(known + slot * most + row, mask=inside, other=0)
    out = seq * rows + row
    tl.store(tokens + out, tl.where(holds & (row > 0), token, tl.load(roots + slot)), mask=inside)
    tl.store(repeat + out, tl.where(holds, times + 1, _NONE), mask=inside)
    tl.store(position + out, tl.load(lengths + slot) + row, mask=inside)
    tl.store(virtual + out, slot + tl.maximum(times, 0) * per_repeat, mask=inside)
    final = tl.load(repeats + slot * most) + 1 == most
    tl.store(deciding + slot, ((tl.load(alive + slot) != 0) & final).to(tl.uint8))


def board(columns: FlightColumns, state: Columns, rows: int, slots_per_repeat: int) -> Boarded:
    """`board` of ops/flights.py. Slots that are not in the round have no entry in `deciding`."""
    batch, most = state.slots.shape[0], columns.tokens.shape[1]
    tokens, repeat, position, slots = torch.empty(4, batch, rows, dtype=torch.long, device=state.slots.device)
    deciding = torch.empty_like(state.alive_slots)
    _board[(batch,)](
        columns.tokens, columns.repeat, state.slots, state.roots, state.lengths, state.alive_slots.view(torch.uint8),
        tokens, repeat, position, slots, deciding.view(torch.uint8), rows, most, slots_per_repeat,
        BLOCK=triton.next_power_of_2(rows), **launched(state.slots.device, 1),
    )  # fmt: skip
    return Boarded(tokens, repeat, position, slots, deciding)


@triton.jit
def _continue(
    hidden, slots, repeat, embedded, out, rows, most, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Copy the state of one row, or its embedding."""
    take_turn(EARLY)
    row, seq, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    place, inside = seq * rows + row, at < K
    entered = tl.load(repeat + place) > 1
    state = tl.load(hidden + (tl.load(slots + seq) * most + row) * K + at, mask=inside & entered, other=0.0)
    embedding = tl.load(embedded + place * K + at, mask=inside & (entered == 0), other=0.0)
    tl.store(out + place * K + at, tl.where(entered, state, embedding), mask=inside)


def continued(hidden: Tensor, slots: Tensor, repeat: Tensor, embedded: Tensor) -> Tensor:
    """`continued` of ops/flights.py."""
    (batch, rows), (_, most, k) = repeat.shape, hidden.shape
    out, block = torch.empty_like(embedded), triton.next_power_of_2(k)
    _continue[(rows, batch)](
        hidden, slots, repeat, embedded.contiguous(), out, rows, most,
        K=k, BLOCK=block, **launched(slots.device, min(8, block // 256)),
    )  # fmt: skip
    return out


@triton.jit
def _move(
    tokens, repeat, hidden, predicted, sure, slots, speculates, count, broken, drafted, to_tokens, to_repeat, to_hidden,
    rows, most, width, K: tl.constexpr, EVERY: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Store one row of one sequence. Every program finds for itself which row's prediction enters."""
    take_turn(EARLY)
    to, seq, row, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    slot, first_row, inside = tl.load(slots + seq), seq * rows, row < rows
    times = tl.load(repeat + first_row + row, mask=inside, other=_NONE)
    next_times = tl.load(repeat + first_row + row + 1, mask=row + 1 < rows, other=_NONE)
    next_token = tl.load(tokens + first_row + row + 1, mask=row + 1 < rows, other=0)
    column = row if EVERY else tl.minimum(row, 1)
    choice = tl.load(predicted + seq * width + column, mask=inside, other=0)
    speculating = tl.load(speculates + slot) != 0
    counts = (times != _NONE) & speculating
    if not EVERY:
        counts = counts & (row == tl.sum((times != _NONE).to(tl.int32), 0) - 1)
    if GATED:
        counts = counts & (tl.load(sure + seq * width + column, mask=inside, other=0) != 0)
    final = tl.load(repeat + first_row) == most
    counts = counts | ((row == 0) & final)
    follows = (next_token == choice) & (next_times != _NONE)
    first = tl.min(tl.where(counts & (follows == 0), row, rows), 0)  # `rows`: there is none
    decided = tl.load(count + seq)
    source = to + decided
    enters = source == first + 1
    known = source < rows
    token = tl.load(tokens + first_row + source, mask=known, other=0)
    token = tl.where(enters, tl.sum(tl.where(row == first, choice, 0), 0), token)
    kept = tl.where(source <= first, tl.load(repeat + first_row + source, mask=known, other=_NONE), _NONE)
    kept = tl.where(enters, 0, kept)
    kept = tl.where(final & (decided == 0), tl.where(to == 0, 0, _NONE), kept)
    place = slot * most + to
    tl.store(to_tokens + place, token)
    tl.store(to_repeat + place, kept)
    state = tl.load(hidden + (first_row + tl.minimum(source, rows - 1)) * K + at, mask=at < K, other=0.0)
    tl.store(to_hidden + place * K + at, state, mask=at < K)
    if to == 0:
        tl.store(drafted + seq, ((tl.load(broken + seq) != 0) & speculating).to(tl.int64))


def move(
    columns: FlightColumns,
    state: Columns,
    flight: Flight,
    predicted: Tensor,
    sure: Tensor | None,
    every: bool,
    decision: Decision,
) -> None:
    """`move` of ops/flights.py."""
    (batch, rows, k), most = flight.hidden.shape, columns.tokens.shape[1]
    flags = state.speculates if sure is None else sure.contiguous()
    block = triton.next_power_of_2(k)
    _move[(min(rows + 1, most), batch)](
        flight.tokens, flight.repeat, flight.hidden.contiguous(), predicted.contiguous(), flags.view(torch.uint8),
        state.slots, state.speculates.view(torch.uint8), decision.count, decision.broken.view(torch.uint8), decision.drafted,
        *columns, rows, most, predicted.shape[1],
        K=k, EVERY=every, GATED=sure is not None, ROWS=triton.next_power_of_2(rows), BLOCK=block,
        **launched(state.slots.device, min(8, block // 256)),
    )  # fmt: skip
