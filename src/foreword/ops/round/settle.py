"""The decisions of a round as kernels, one program per sequence: FIT before the pass, ACCEPT and COMMIT's columns after it.

ops/rounds.py has the torch references, and the tests compare the two. As torch operations a round would be a hundred
launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.rounds import CandidateRows, Columns, Decision


@triton.jit
def _fit(
    tokens, depth, size, slots, roots, alive, speculates, fitted, counts, t_seq, t_row, d_seq, d_row,
    NODES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    row = tl.arange(0, BLOCK)
    real = row < NODES
    speculating = (tl.load(alive + slot) != 0) & (tl.load(speculates + slot) != 0)
    rows = tl.where(speculating, tl.load(size + seq), 1)
    is_candidate = (row < rows) & (tl.load(depth + seq * d_seq + row * d_row, mask=real, other=0) > 0)
    token = tl.load(tokens + seq * t_seq + row * t_row, mask=real, other=0)
    tl.store(fitted + seq * NODES + row, tl.where(is_candidate, token, tl.load(roots + slot)), mask=real)
    tl.store(counts + seq, rows)


@triton.jit
def _decide(
    choice, candidates, parent, ancestors, depth, size, peak, slots, lengths, limits, alive, heeds_ends, ends,
    path, tokens, count, last, drafted, ended, broken,
    p_seq, p_row, a_seq, a_row, a_column, d_seq, d_row, k_seq, k_row, k_token,
    NODES: tl.constexpr, PLACES: tl.constexpr, ENDS: tl.constexpr,
    BLOCK: tl.constexpr, PATH: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    row, place = tl.arange(0, BLOCK), tl.arange(0, PATH)
    real = row < NODES
    rows = tl.load(size + seq)
    above = tl.load(parent + seq * p_seq + row * p_row, mask=real, other=0)
    row_depth = tl.load(depth + seq * d_seq + row * d_row, mask=real, other=0)
    expected = tl.load(choice + seq * NODES + above, mask=real, other=0)
    token = tl.load(candidates + seq * NODES + row, mask=real, other=0)
    matches = ((token == expected) & (row < rows)) | (row == 0)
    # A row is accepted if no row on its path fails. Rows of the matrix are rows of the tree.
    both = real[:, None] & real[None, :]
    sees = ancestors + seq * a_seq + row[:, None] * a_row + row[None, :] * a_column
    fails = tl.load(sees, mask=both, other=0).to(tl.int32) * (1 - matches.to(tl.int32))[None, :]
    accepted = (tl.max(fails, 1) == 0) & real
    # The deepest accepted row; the first of several.
    rank = tl.where(accepted, row_depth.to(tl.int32) * BLOCK + (BLOCK - 1 - row), -1)
    best = BLOCK - 1 - (tl.max(rank, 0) % BLOCK)
    on_path = tl.load(ancestors + seq * a_seq + best * a_row + row * a_column, mask=real, other=0) != 0
    found = tl.sum(on_path.to(tl.int64), 0)
    at_place = on_path[None, :] & (row_depth[None, :] == place[:, None])
    path_rows = tl.sum(tl.where(at_place, row[None, :], 0), 1).to(tl.int64)
    chosen = tl.load(choice + seq * NODES + path_rows)

    is_end = place < 0
    for i in tl.static_range(ENDS):
        is_end = is_end | (chosen == tl.load(ends + i))
    is_end = is_end & (place < PLACES) & (tl.load(heeds_ends + slot) != 0)
    before_end = tl.min(tl.where(is_end, place, PLACES), 0).to(tl.int64) + 1
    room = tl.load(limits + slot) - tl.load(lengths + slot) - 1
    found = tl.minimum(tl.minimum(found, before_end), room)
    is_alive = tl.load(alive + slot) != 0
    ends_here = ((found == before_end) | (found == room)) & is_alive
    found = tl.where(is_alive, found, 0)

    kept = (place < found) & (place < PLACES)
    score = tl.load(peak + seq * k_seq + path_rows * k_row + chosen * k_token, mask=kept, other=0.0)
    has_nan = tl.max((score != score).to(tl.int32), 0) > 0
    found = tl.where(has_nan, 0, found)
    final = tl.maximum(found - 1, 0)
    tl.store(path + seq * PLACES + place, path_rows, mask=place < PLACES)
    tl.store(tokens + seq * PLACES + place, chosen, mask=place < PLACES)
    tl.store(count + seq, found)
    tl.store(last + seq, tl.sum(tl.where(place == final, chosen, 0), 0))
    tl.store(drafted + seq, tl.where(is_alive, rows - 1, 0))
    tl.store(ended + seq, tl.where(has_nan, 0, ends_here.to(tl.int32)).to(tl.uint8))
    tl.store(broken + seq, has_nan.to(tl.uint8))


@triton.jit
def _write(
    slots, lengths, roots, sequences, alive, tokens, count, last, ended, t_slot,
    PLACES: tl.constexpr, PATH: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    place = tl.arange(0, PATH)
    decided = tl.load(count + seq)
    kept = (place < decided) & (place < PLACES)
    token = tl.load(tokens + seq * PLACES + place, mask=kept, other=0)
    tl.store(sequences + slot * t_slot + tl.load(lengths + slot) + 1 + place, token, mask=kept)
    tl.store(roots + slot, tl.load(last + seq), mask=decided > 0)
    tl.store(alive + slot, 0, mask=tl.load(ended + seq) != 0)


def fitted(state: Columns, tokens: Tensor, depth: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """`fit` of ops/rounds.py."""
    batch, nodes = tokens.shape
    counts, out = torch.empty_like(state.slots), torch.empty(batch, nodes, dtype=tokens.dtype, device=tokens.device)
    _fit[(batch,)](
        tokens, depth, size.contiguous(), state.slots, state.roots, _bytes(state.alive_slots), _bytes(state.speculates),
        out, counts,
        *tokens.stride(), *_strides(depth),
        NODES=nodes, BLOCK=triton.next_power_of_2(nodes), **launched(tokens.device, 1),
    )  # fmt: skip
    return out, counts


def decided(state: Columns, draft: CandidateRows, choice: Tensor, peak: Tensor, decision: Decision) -> tuple[Tensor, Tensor]:
    """`decide` of ops/rounds.py."""
    parent, ancestors, depth, ends = draft.tree.parent, draft.tree.ancestors, draft.tree.depth, state.ends
    (batch, nodes), places = choice.shape, decision.tokens.shape[1]
    path, last = torch.empty_like(decision.tokens), torch.empty_like(decision.count)
    shared = peak.shape[2] == 1
    block = triton.next_power_of_2(nodes)
    _decide[(batch,)](
        choice.contiguous(), draft.tokens.contiguous(), parent, _bytes(ancestors), depth, draft.size.contiguous(), peak,
        state.slots, state.lengths, state.limits, _bytes(state.alive_slots), _bytes(state.heeds_ends), ends,
        path, decision.tokens, decision.count, last, decision.drafted, _bytes(decision.ended), _bytes(decision.broken),
        *_strides(parent), *_strides(ancestors), *_strides(depth),
        *peak.stride()[:2], 0 if shared else peak.stride(2),
        NODES=nodes, PLACES=places, ENDS=ends.shape[0], BLOCK=block, PATH=triton.next_power_of_2(places),
        **launched(choice.device, min(16, block * block // 1024)),
    )  # fmt: skip
    return path, last


def written(state: Columns, tokens: Tensor, count: Tensor, last: Tensor, ended: Tensor) -> None:
    """`write` of ops/rounds.py."""
    batch, places = tokens.shape
    _write[(batch,)](
        state.slots, state.lengths, state.roots, state.tokens, _bytes(state.alive_slots), tokens.contiguous(), count,
        last, _bytes(ended), state.tokens.stride(0),
        PLACES=places, PATH=triton.next_power_of_2(places), **launched(tokens.device, 1),
    )  # fmt: skip


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a tensor, with 0 for the first axis where all sequences share one entry."""
    return (tensor.stride(0) if tensor.shape[0] > 1 else 0, *tensor.stride()[1:])
