"""Token Recycling's table: one kernel walks it along a template, one overwrites it with the target's new candidates.

In: the table of candidates and their log-probabilities [tables, V + 1, K]; its last row takes writes that do not count. A
template is the ranks by which each node is reached from the root [M, D], so every node finds its token independently. The
torch references are in ops/recycling.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.drafting.growth import draft_likeliest
from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.recycling import CandidateTable, RankTemplate, SlotNoise
from foreword.ops.round.noise import gumbel, noise_bits


@triton.jit
def _of_rank(tokens, chances, row, rank, on, key, temperature, position, K: tl.constexpr):
    """Return the candidate of rank `rank` [BLOCK] under noise in rows [BLOCK] of the table: token and log-probability."""
    at = row[:, None] * K + tl.arange(0, K)[None, :]
    token = tl.load(tokens + at, mask=on[:, None], other=0)
    chance = tl.load(chances + at, mask=on[:, None], other=0.0)
    score = chance / temperature + gumbel(noise_bits(key, position, token))
    place = tl.arange(0, K)
    equal_and_first = (score[:, None, :] == score[:, :, None]) & (place[None, :] < place[:, None])[None, :, :]
    ahead = (score[:, None, :] > score[:, :, None]) | equal_and_first
    chosen = tl.sum(ahead.to(tl.int32), 2) == rank[:, None]
    return tl.sum(tl.where(chosen, token, 0), 1), tl.sum(tl.where(chosen, chance, 0.0), 1)


@triton.jit
def _walk(
    tokens, chances, slots, roots, ranks, depths, parents, fading, lengths, keys, temperatures, out, above, size, vocabulary,
    COUNT: tl.constexpr, DEPTH: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr, OWN: tl.constexpr,
    NOISE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Follow every node's ranks for one sequence, then keep the likeliest nodes in the template's order."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    root = tl.load(roots + slot)
    node = tl.arange(0, BLOCK)
    real = node < COUNT
    depth = tl.load(depths + node, mask=real, other=0)
    table = slot * (vocabulary + 1) if OWN else slot * 0
    token = tl.zeros([BLOCK], tl.int64) + root
    chance = tl.zeros([BLOCK], tl.float32)
    temperature = 0.0
    if NOISE:
        temperature = tl.load(temperatures + slot)
    for step in tl.static_range(DEPTH):
        on = real & (step < depth)
        rank = tl.load(ranks + node * DEPTH + step, mask=on, other=0)
        if temperature > 0:
            position = tl.load(lengths + slot) + step + 1
            found, worth = _of_rank(tokens, chances, table + token, rank, on, keys + 2 * slot, temperature, position, K)
        else:
            at = (table + token) * K + rank
            found, worth = tl.load(tokens + at, mask=on, other=0), tl.load(chances + at, mask=on, other=0.0)
        chance += tl.where(on, worth, 0.0)
        token = tl.where(on, found.to(tl.int64), token)
    chance += tl.load(fading + node, mask=real, other=0.0)
    chance = tl.where(real, chance, float("-inf"))

    parent = tl.load(parents + node, mask=real, other=0).to(tl.int32)
    rows = draft_likeliest(token, chance, parent, root, out, above, seq, COUNT, NODES, BLOCK)
    tl.store(size + seq, rows.to(tl.int64))


@triton.jit
def _when(rows, seq, row, path, count, nodes, PLACES: tl.constexpr, WAY: tl.constexpr):
    """Return whether rows are learned from, and in which order: accepted ones after all others."""
    counts = row < tl.load(rows + seq)
    when = row
    if PLACES > 0:
        accepted = tl.load(count + seq)
        place = tl.arange(0, WAY)
        held = (place[None, :] < accepted[:, None]) & (place < PLACES)[None, :]
        accepted_row = tl.load(path + seq[:, None] * PLACES + place[None, :], mask=held, other=-1)
        when += tl.max((accepted_row == row[:, None]).to(tl.int32), 1).to(tl.int64) * nodes
        counts = counts & (accepted > 0)
    return counts, when


@triton.jit(do_not_specialize=["batch", "nodes", "s_seq"])  # prompts come in all lengths
def _learn(
    tokens, chances, slots, seen, rows, path, count, best, worth, batch, nodes, vocabulary, s_seq,
    PLACES: tl.constexpr, WAY: tl.constexpr, K: tl.constexpr, OWN: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Write those of EACH rows of a pass that no later row overwrites."""
    take_turn(EARLY)
    total = batch * nodes
    own = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    real = own < total
    goal, time = _goal(slots, seen, rows, path, count, own, real, batch, nodes, vocabulary, s_seq, PLACES, WAY, OWN)
    beaten = tl.zeros([EACH], tl.int32)
    for start in range(0, total, BLOCK):
        other = start + tl.arange(0, BLOCK).to(tl.int64)
        theirs, later = _goal(
            slots, seen, rows, path, count, other, other < total, batch, nodes, vocabulary, s_seq, PLACES, WAY, OWN
        )
        beats = (theirs[None, :] == goal[:, None]) & (later[None, :] > time[:, None])
        beaten |= tl.max(beats.to(tl.int32), 1)
    rank = tl.arange(0, RANKS)
    here = (real & (goal >= 0) & (beaten == 0))[:, None] & (rank < K)[None, :]
    token = tl.load(best + own[:, None] * K + rank[None, :], mask=here, other=0)
    chance = tl.load(worth + own[:, None] * K + rank[None, :], mask=here, other=0.0)
    finite = (chance == chance) & (tl.abs(chance) != float("inf"))
    at = goal[:, None] * K + rank[None, :]
    tl.store(tokens + at, token.to(tl.int32), mask=here)
    tl.store(chances + at, tl.where(finite, chance, float("-inf")), mask=here)


@triton.jit
def _goal(
    slots, seen, rows, path, count, line, real, batch, nodes, vocabulary, s_seq,
    PLACES: tl.constexpr, WAY: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Return which row of the table each row of a pass overwrites, -1 for none, and in which order."""
    seq, row = tl.where(real, line // nodes, 0), line % nodes
    counts, when = _when(rows, seq, row, path, count, nodes, PLACES, WAY)
    token = tl.load(seen + seq * s_seq + row)
    table = tl.load(slots + seq) * (vocabulary + 1) if OWN else seq * 0
    return tl.where(real & counts, table + token, -1), when * batch + seq


def walked(
    table: CandidateTable,
    template: RankTemplate,
    slots: Tensor,
    roots: Tensor,
    nodes: int,
    own: bool,
    noise: SlotNoise | None = None,
    cost: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`walked` of ops/recycling.py, with a fixed number of rows."""
    tokens, chances = table
    ranks, depths, parents, fading, _ = template
    assert cost is None, "rows are fixed where this kernel runs"
    (count, depth), batch, device = ranks.shape, slots.shape[0], slots.device
    assert nodes <= count and tokens.is_contiguous() and chances.is_contiguous()
    out, above = (torch.empty(batch, nodes, dtype=torch.long, device=device) for _ in range(2))
    size = torch.empty(batch, dtype=torch.long, device=device)
    _walk[(batch,)](
        tokens, chances, slots, roots, ranks, depths, parents, fading, *(noise or (roots, roots, fading)), out, above, size,
        tokens.shape[1] - 1, COUNT=count, DEPTH=depth, K=tokens.shape[2], NODES=nodes, OWN=own, NOISE=noise is not None,
        BLOCK=triton.next_power_of_2(count), **launched(device, 8),
    )  # fmt: skip
    return out, above, size


def learnt(
    table: CandidateTable,
    slots: Tensor,
    seen: Tensor,
    size: Tensor,
    ranked: tuple[Tensor, Tensor],
    accepted: tuple[Tensor, Tensor] | None,
    own: bool,
) -> None:
    """`learnt` of ops/recycling.py."""
    tokens, chances = table
    (batch, nodes), device = seen.shape, seen.device
    path, count = accepted or (size, size)
    places = path.shape[1] if accepted else 0
    each = 16
    assert seen.stride(1) == 1
    _learn[(triton.cdiv(batch * nodes, each),)](
        tokens, chances, slots, seen, size, path.contiguous(), count, *ranked,
        batch, nodes, tokens.shape[1] - 1, seen.stride(0),
        PLACES=places, WAY=triton.next_power_of_2(max(places, 1)), K=tokens.shape[2], OWN=own,
        EACH=each, BLOCK=64, RANKS=triton.next_power_of_2(tokens.shape[2]), **launched(device),
    )  # fmt: skip
