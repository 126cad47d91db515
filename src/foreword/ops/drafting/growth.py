"""Trees that follow the candidates: one launch per level, and one that chooses among all nodes. If candidates do not depend
on the tokens before them, one launch fills a template or chooses its likeliest paths.

In: the candidates after the live nodes of a level and their log-probabilities, [b, w, k] each. Out: the nodes to continue
from, and in the end a draft. Nodes are stored in buffers [b, M], the root first, then level by level. One program handles
one sequence. Ties go to the earlier node. The torch references are in ops/growth.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.growth import Budget, RankPaths
from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.rounds import Columns

_NEVER = tl.constexpr(float("-inf"))
_PAIRS = tl.constexpr(16384)  # compared at a time, as many as the registers of 16 warps hold easily


@triton.jit
def _comes_before(chance, node, others, numbers):
    """Return 1 where another node comes before a node: if it is likelier, or as likely and earlier. [nodes, others]."""
    other, own = others[None, :], chance[:, None]
    return ((other > own) | ((other == own) & (numbers[None, :] < node[:, None]))).to(tl.int32)


@triton.jit
def draft_likeliest(
    token, chance, parent, root, out, above, seq, COUNT: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the NODES likeliest of COUNT nodes, in the given order, then padding. Return how many nodes there are.

    token, chance and parent are [BLOCK]. chance: log-probability of the path, -inf after the last node.
    """
    node = tl.arange(0, BLOCK)
    chunk: tl.constexpr = min(BLOCK, 64, _PAIRS // BLOCK)
    before = tl.zeros([BLOCK, chunk], tl.int32)
    for start in range(0, COUNT, chunk):
        numbers = start + tl.arange(0, chunk)
        before += _comes_before(chance, node, tl.gather(chance, numbers, 0), numbers)
    kept = (tl.sum(before, 1) < NODES) & (chance > _NEVER)
    chosen = kept.to(tl.int32)
    rows = tl.sum(chosen, 0)
    row = tl.where(kept, tl.cumsum(chosen, 0) - chosen, 0)
    first = seq * NODES
    tl.store(out + first + row, token, mask=kept)
    tl.store(above + first + row, tl.gather(row, parent, 0).to(tl.int64), mask=kept)
    padding = (node >= rows) & (node < NODES)
    tl.store(out + first + node, tl.zeros([BLOCK], tl.int64) + root, mask=padding)
    tl.store(above + first + node, tl.zeros([BLOCK], tl.int64), mask=padding)
    return rows


@triton.jit
def _path_chances(
    log_probs, live, chances, seq, candidate, l_seq, l_live, l_rank, top_p, floor,
    FIRST: tl.constexpr, LIVE: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
    BUDGETED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Return log-probabilities of the whole paths to candidates, -inf for those that do not count."""
    place, rank = candidate // K, candidate % K
    real = place < LIVE
    at_live = log_probs + seq * l_seq + place * l_live
    whole = tl.load(at_live + rank * l_rank, mask=real, other=_NEVER).to(tl.float32)
    if not FIRST:
        node = tl.load(live + seq * LIVE + place, mask=real, other=0)
        whole += tl.load(chances + seq * MOST + node, mask=real, other=0.0)
    counts = real & (tl.abs(whole) < float("inf"))
    if BUDGETED:
        other = tl.arange(0, RANKS)
        up_to = real[:, None] & (other[None, :] <= rank[:, None])
        some = tl.load(at_live[:, None] + other[None, :] * l_rank, mask=up_to, other=_NEVER).to(tl.float32)
        chance = tl.exp(some)
        own = tl.sum(tl.where(other[None, :] == rank[:, None], chance, 0.0), 1)
        best = tl.sum(tl.where(other[None, :] == 0, chance, 0.0), 1)
        inside = tl.sum(chance, 1) <= top_p + 1e-6
        counts = counts & ((inside & (own >= floor * best)) | (rank == 0))
    return tl.where(counts, whole, _NEVER)


@triton.jit(do_not_specialize=["base"])
def _level(
    candidates, log_probs, slots, roots, live, left, tokens, parents, chances,
    next_tokens, next_origin, next_nodes, next_left,
    base, c_seq, c_live, c_rank, l_seq, l_live, l_rank, top_p, floor,
    FIRST: tl.constexpr, LIVE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr,
    MOST: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add the nodes of a level for one sequence, and store those to continue from. BUDGET 0: add all, in their order."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    real = candidate < LIVE * K
    whole = _path_chances(
        log_probs, live, chances, seq, candidate, l_seq, l_live, l_rank, top_p, floor,
        FIRST, LIVE, K, RANKS, BUDGET > 0, MOST,
    )  # fmt: skip
    chunk: tl.constexpr = min(BLOCK, 64, _PAIRS // BLOCK)
    before = tl.zeros([BLOCK, chunk], tl.int32)
    for start in range(0, LIVE * K, chunk):
        other = start + tl.arange(0, chunk)
        theirs = _path_chances(
            log_probs, live, chances, seq, other, l_seq, l_live, l_rank, top_p, floor,
            FIRST, LIVE, K, RANKS, BUDGET > 0, MOST,
        )  # fmt: skip
        before += _comes_before(whole, candidate, theirs, other)
    place = tl.sum(before, 1)

    origin = candidate // K
    token = tl.load(candidates + seq * c_seq + origin * c_live + candidate % K * c_rank, mask=real, other=0)
    parent = tl.zeros([BLOCK], tl.int64)
    if not FIRST:
        parent = tl.load(live + seq * LIVE + origin, mask=real, other=0)
    added, spot = real, candidate
    if BUDGET > 0:
        room = BUDGET if FIRST else tl.load(left + seq)
        added, spot = real & (place < BUDGET), place
        whole = tl.where(place < room, whole, _NEVER)
        tl.store(next_left + seq, room - tl.sum((added & (whole > _NEVER)).to(tl.int64), 0))
    at = seq * MOST + base + spot
    tl.store(tokens + at, token, mask=added)
    tl.store(parents + at, parent, mask=added)
    tl.store(chances + at, whole, mask=added)
    if FIRST:
        tl.store(tokens + seq * MOST, tl.load(roots + tl.load(slots + seq)))
        tl.store(parents + seq * MOST, 0)
        tl.store(chances + seq * MOST, 0.0)
    continues = real & (place < WIDTH)
    at_next = seq * WIDTH + place
    tl.store(next_tokens + at_next, token, mask=continues)
    tl.store(next_origin + at_next, origin.to(tl.int64), mask=continues)
    tl.store(next_nodes + at_next, (base + spot).to(tl.int64), mask=continues)


@triton.jit
def _choose(
    tokens, parents, chances, slots, lengths, out, above, size,
    COUNT: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the likeliest nodes of one sequence. Before its second token only the root counts."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    real = node < COUNT
    at = seq * COUNT + node
    token = tl.load(tokens + at, mask=real, other=0)
    chance = tl.load(chances + at, mask=real, other=_NEVER)
    parent = tl.load(parents + at, mask=real, other=0).to(tl.int32)
    root = tl.load(tokens + seq * COUNT)
    rows = draft_likeliest(token, chance, parent, root, out, above, seq, COUNT, NODES, BLOCK)
    known = tl.load(lengths + tl.load(slots + seq)) > 0
    tl.store(size + seq, tl.where(known, rows, 1).to(tl.int64))


@triton.jit
def _choose_paths(
    candidates, log_probs, paths, parents, have, slots, roots, out, above, size, l_seq,
    CANDIDATES: tl.constexpr, STEPS: tl.constexpr, COUNT: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the likeliest paths of one sequence among those that its steps reach."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot, node = tl.load(slots + seq), tl.arange(0, BLOCK)
    real, root = node < COUNT, tl.load(roots + slot)
    token, whole, length = tl.zeros([BLOCK], tl.int64) + root, tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        candidate = tl.load(paths + node * STEPS + step, mask=real, other=CANDIDATES)
        inside = candidate < CANDIDATES
        token = tl.where(inside, tl.load(candidates + seq * CANDIDATES + candidate, mask=inside, other=0), token)
        whole += tl.load(log_probs + seq * l_seq + candidate, mask=inside, other=0.0)
        length += inside.to(tl.int32)
    chance = tl.where(real & (length <= tl.load(have + slot)) & (whole == whole), whole, _NEVER)
    parent = tl.load(parents + node, mask=real, other=0).to(tl.int32)
    rows = draft_likeliest(token, chance, parent, root, out, above, seq, COUNT, NODES, BLOCK)
    tl.store(size + seq, rows.to(tl.int64))


@triton.jit
def _fill(
    candidates, ranks, slots, roots, lengths, tokens, size, c_seq, c_level, c_rank,
    NODES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Fill a template for one sequence. Before its second token only the root counts."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot, node = tl.load(slots + seq), tl.arange(0, BLOCK)
    real = (node > 0) & (node < NODES)
    pair = ranks + (node - 1) * 2
    offset = tl.load(pair, mask=real, other=0) * c_level + tl.load(pair + 1, mask=real, other=0) * c_rank
    token = tl.load(candidates + seq * c_seq + offset, mask=real, other=0)
    tl.store(tokens + seq * NODES + node, tl.where(real, token, tl.load(roots + slot)), mask=node < NODES)
    tl.store(size + seq, tl.where(tl.load(lengths + slot) > 0, NODES, 1).to(tl.int64))


class KernelTrees:
    """`GrowingTrees` of ops/growth.py, by kernels."""

    def __init__(self, state: Columns, depth: int, width: int, branch: int, budget: Budget | None = None) -> None:
        self.state, self.width, self.branch, self.budget = state, width, branch, budget
        self.count, self.live, self.most = 1, 1, self._room(depth)
        batch, device = state.slots.shape[0], state.slots.device
        self.tokens, self.parents = torch.empty(2, batch, self.most, dtype=torch.long, device=device)
        self.chances = torch.empty(batch, self.most, dtype=torch.float32, device=device)
        self.nodes = self.left = state.slots  # the first level has none

    def _room(self, depth: int) -> int:
        room = live = 1
        for _ in range(depth):
            room += self._added(live)
            live = min(self.width, self._added(live))
        return room

    def _added(self, live: int) -> int:
        return live * self.branch if self.budget is None else min(live * self.branch, self.budget.nodes)

    def add(self, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """`GrowingTrees.add`."""
        batch, live, branch = candidates.shape
        assert log_probs.shape == candidates.shape and (live, branch) == (self.live, self.branch)
        most = self._added(live)
        width, block = min(self.width, most), triton.next_power_of_2(live * branch)
        tokens, origin, nodes = torch.empty(3, batch, width, dtype=torch.long, device=candidates.device)
        left = torch.empty_like(self.left)
        rule = self.budget or Budget(0, 0.0, 0.0)
        _level[(batch,)](
            candidates, log_probs, self.state.slots, self.state.roots, self.nodes, self.left,
            self.tokens, self.parents, self.chances, tokens, origin, nodes, left,
            self.count, *candidates.stride(), *log_probs.stride(), rule.top_p, rule.floor,
            FIRST=self.count == 1, LIVE=live, K=branch, WIDTH=width, BUDGET=rule.nodes, MOST=self.most,
            RANKS=triton.next_power_of_2(branch), BLOCK=block, **launched(candidates.device, min(16, block // 16)),
        )  # fmt: skip
        self.count, self.live, self.nodes, self.left = self.count + most, width, nodes, left
        return tokens, origin

    @property
    def chance(self) -> Tensor:
        """`GrowingTrees.chance`, once a level was added."""
        return self.chances.gather(1, self.nodes)

    def chosen(self, nodes: int, cost: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert cost is None, "rows are fixed where a round is captured"
        return likeliest_nodes(self.state, self.tokens, self.parents, self.chances, nodes)


def likeliest_nodes(
    state: Columns, tokens: Tensor, parents: Tensor, chances: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the likeliest `nodes` of [b, M], the root first: tokens and parents [b, nodes], and sizes [b]."""
    (batch, count), nodes = tokens.shape, min(nodes, tokens.shape[1])
    out, above = torch.empty(2, batch, nodes, dtype=torch.long, device=tokens.device)
    size, block = torch.empty_like(state.slots), triton.next_power_of_2(count)
    _choose[(batch,)](
        tokens, parents, chances, state.slots, state.lengths, out, above, size,
        COUNT=count, NODES=nodes, BLOCK=block, **launched(out.device, min(16, block // 16)),
    )  # fmt: skip
    return out, above, size


def likeliest_paths(
    state: Columns, candidates: Tensor, log_probs: Tensor, paths: RankPaths, have: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`likeliest_paths` of ops/growth.py."""
    (ways, parents), (batch, steps, k) = paths[:2], candidates.shape
    count, nodes = ways.shape[0], min(nodes, ways.shape[0])
    assert candidates.is_contiguous() and log_probs.is_contiguous() and ways.shape[1] == steps
    out, above = torch.empty(2, batch, nodes, dtype=torch.long, device=candidates.device)
    size, block = torch.empty_like(state.slots), triton.next_power_of_2(count)
    _choose_paths[(batch,)](
        candidates, log_probs, ways, parents, have, state.slots, state.roots, out, above, size,
        log_probs.stride(0) if log_probs.shape[0] > 1 else 0,
        CANDIDATES=steps * k, STEPS=steps, COUNT=count, NODES=nodes, BLOCK=block,
        **launched(out.device, min(16, block // 16)),
    )  # fmt: skip
    return out, above, size


def filled(state: Columns, candidates: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """`filled` of ops/growth.py."""
    batch, nodes = candidates.shape[0], 1 + ranks.shape[0]
    assert ranks.is_contiguous()
    tokens, size = torch.empty(batch, nodes, dtype=torch.long, device=candidates.device), torch.empty_like(state.slots)
    _fill[(batch,)](
        candidates, ranks, state.slots, state.roots, state.lengths, tokens, size, *candidates.stride(),
        NODES=nodes, BLOCK=triton.next_power_of_2(nodes), **launched(candidates.device, 1),
    )  # fmt: skip
    return tokens, size
