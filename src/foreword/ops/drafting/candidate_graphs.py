"""Graphs of candidates: one launch per level that is added, and two for the tree that is unrolled in the end.

In: the candidates after the nodes that were read last and their log-probabilities, [b, w, n] each. Out: the nodes to read
next, and in the end a draft. One program handles one sequence. Candidates are stored in buffers [b, M], level by level. The
bits of an int64 say which of the w nodes something leads to, so at most 64 nodes of a level are read. Ties go to the earlier
candidate. The torch reference is in ops/candidate_graphs.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.candidate_graphs import GraphCandidates, Rule
from foreword.ops.drafting.growth import likeliest_nodes
from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.rounds import Columns

_NEVER = tl.constexpr(float("-inf"))
_NOWHERE = tl.constexpr(-1)
_MIX = tl.constexpr(0x5851F42D4C957F2D)  # as in ops/candidate_graphs.py
_CHUNK = tl.constexpr(64)  # candidates compared with all others at a time, or fewer:
_PAIRS = tl.constexpr(8192)  # pairs at a time, as many as registers hold easily


# Add a level -------------------------------------------------------------------------------------------------------------


@triton.jit
def _finite(chance):
    return tl.where(tl.abs(chance) < float("inf"), chance, _NEVER)


@triton.jit
def _or(one, other):
    return one | other


@triton.jit
def _united(bits):
    """Return the union of the bits in each row: [m, n] -> [m]."""
    return tl.reduce(bits, 1, _or)


@triton.jit
def _joined(one, other, COUNT: tl.constexpr):
    """Compose two relations of what leads to what, given as bits [n] and [COUNT]."""
    bit = tl.arange(0, COUNT)[None, :]
    return _united(tl.where(((one[:, None] >> bit) & 1) != 0, other[None, :], 0))


@triton.jit
def _closed(step, COUNT: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Return the transitive closure of a relation."""
    for _ in tl.static_range(DOUBLINGS):
        step |= _joined(step, step, COUNT)
    return step


@triton.jit
def _any(bits, LIVE_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Return the union of the bits of all candidates [LIVE_BLOCK * RANK_BLOCK] after the same node: [LIVE_BLOCK]."""
    return _united(tl.reshape(bits, [LIVE_BLOCK, RANK_BLOCK]))


@triton.jit
def _each(values, LIVE_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Repeat the values of nodes [LIVE_BLOCK] for each candidate after them."""
    return tl.reshape(tl.broadcast_to(values[:, None], [LIVE_BLOCK, RANK_BLOCK]), [LIVE_BLOCK * RANK_BLOCK])


@triton.jit
def _leads(reads, reach, candidate, known):
    """Return which nodes of the level older candidates lead to: none if they were not read."""
    number = tl.load(reads + candidate, mask=known, other=_NOWHERE)
    return tl.load(reach + number, mask=number >= 0, other=0)


@triton.jit
def _older(key, place, keys, goals, reads, reach, count, BLOCK: tl.constexpr):
    """Return the first older node with the same last tokens that does not lead back; `count` if there is none."""
    found = tl.zeros([BLOCK], tl.int32) + count
    chunk: tl.constexpr = min(_CHUNK, _PAIRS // BLOCK)
    for start in range(0, count, chunk):
        other = start + tl.arange(0, chunk)
        known = other < count
        is_node = known & (tl.load(goals + other, mask=known, other=_NOWHERE) == other)
        same = key[:, None] == tl.load(keys + other, mask=known, other=0)[None, :]
        back = (_leads(reads, reach, other, known)[None, :] >> place[:, None]) & 1
        fits = same & is_node[None, :] & (back == 0)
        found = tl.minimum(found, tl.min(tl.where(fits, other[None, :], count), 1))
    return found


@triton.jit
def _closing(leads, LIVE_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Return which aliases close a loop together with others of the level and do not lead to a later node of it."""
    closed = _closed(_any(leads, LIVE_BLOCK, RANK_BLOCK), LIVE_BLOCK, DOUBLINGS)
    own, other = tl.arange(0, LIVE_BLOCK)[:, None], tl.arange(0, LIVE_BLOCK)[None, :]
    returns = ((closed[None, :] >> own) & 1) << other
    refused = _united(tl.where(other <= own, returns, 0))
    return (leads & _each(refused, LIVE_BLOCK, RANK_BLOCK)) != 0


@triton.jit
def _twin(key, free, BLOCK: tl.constexpr):
    """Return the first free candidate of the level with the same last tokens."""
    found = tl.full([BLOCK], BLOCK - 1, tl.int32)
    chunk: tl.constexpr = min(BLOCK, _CHUNK, _PAIRS // BLOCK)
    for start in range(0, BLOCK, chunk):
        other = start + tl.arange(0, chunk)
        is_free = tl.gather(free.to(tl.int32), other, 0) != 0
        fits = (key[:, None] == tl.gather(key, other, 0)[None, :]) & is_free[None, :]
        found = tl.minimum(found, tl.min(tl.where(fits, other[None, :], BLOCK - 1), 1))
    return found


@triton.jit
def _spot(whole, real, BLOCK: tl.constexpr):
    """Return how many candidates come before each: the likelier ones, and the earlier ones among those as likely."""
    own = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    chunk: tl.constexpr = min(BLOCK, _CHUNK, _PAIRS // BLOCK)
    for start in range(0, BLOCK, chunk):
        other = start + tl.arange(0, chunk)
        theirs, counts = tl.gather(whole, other, 0)[None, :], tl.gather(real.to(tl.int32), other, 0)[None, :] != 0
        before = (theirs > whole[:, None]) | ((theirs == whole[:, None]) & (other[None, :] < own[:, None]))
        found += tl.sum((before & counts).to(tl.int32), 1)
    return found


@triton.jit
def _store_reach(
    reach, next_reach, leads, bit, readers,
    FIRST: tl.constexpr, LIVE_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Store which read nodes lead to the nodes to read next, new aliases included."""
    itself = tl.full([LIVE_BLOCK], 1, tl.int64) << tl.arange(0, LIVE_BLOCK)
    step = _closed(_any(leads, LIVE_BLOCK, RANK_BLOCK), LIVE_BLOCK, DOUBLINGS) | itself
    onward = _joined(step, _any(bit, LIVE_BLOCK, RANK_BLOCK), LIVE_BLOCK)
    for start in range(0, readers, _CHUNK):
        reader = start + tl.arange(0, _CHUNK)
        known = reader < readers
        before = tl.full([_CHUNK], 1, tl.int64) if FIRST else tl.load(reach + reader, mask=known, other=0)
        tl.store(next_reach + reader, _joined(before, onward, LIVE_BLOCK), mask=known)
    new = tl.arange(0, triton.next_power_of_2(WIDTH))
    tl.store(next_reach + readers + new, (new * 0 + 1).to(tl.int64) << new, mask=new < WIDTH)


@triton.jit
def _token_before(recent, roots, node, seq, real, i, BEFORE: tl.constexpr, FIRST: tl.constexpr):
    """Return token i of the last BEFORE tokens on the path to a node. At the first level only the root is known."""
    if not FIRST:
        return tl.load(recent + node * BEFORE + i, mask=real, other=_NOWHERE)
    elif i == BEFORE - 1:
        return node * 0 + tl.load(roots + seq)
    else:
        return node * 0 + _NOWHERE


@triton.jit
def _key(token, recent, roots, node, seq, real, BEFORE: tl.constexpr, FIRST: tl.constexpr):
    key = token * 0
    for i in tl.static_range(BEFORE):
        key = key * _MIX + _token_before(recent, roots, node, seq, real, i, BEFORE, FIRST) + 1
    return key * _MIX + token + 1


@triton.jit
def _goal(
    key, counts, place, keys, goals, reads, reach, count,
    FIRST: tl.constexpr, K: tl.constexpr, LIVE_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """Find what every candidate that counts leads to: an older node, the first candidate of the level with the same last
    tokens, or itself. Return that, the first such candidate, and which nodes of this level an older node leads to."""
    block: tl.constexpr = LIVE_BLOCK * RANK_BLOCK
    older, found, leads = place * 0 + count, place < 0, tl.zeros([block], tl.int64)
    if not FIRST:
        older = _older(key, place, keys, goals, reads, reach, count, block)
        found = (older < count) & counts
        leads = _leads(reads, reach, older, found)
        found = found & ~_closing(leads, LIVE_BLOCK, RANK_BLOCK, DOUBLINGS)
        leads = tl.where(found, leads, 0)
    twin = _twin(key, counts & ~found, block)
    return tl.where(found, older, count + twin // RANK_BLOCK * K + twin % RANK_BLOCK), twin, leads


@triton.jit
def _count(tally, next_tally, seq, live, merged, FIRST: tl.constexpr) -> None:
    """Count the rows read so far, the rows saved by merging, and the rows that this level will add to the latter."""
    batch, saved = tl.num_programs(0), tl.zeros([], tl.int64)
    if not FIRST:
        live += tl.load(tally + seq)
        saved = tl.load(tally + batch + seq) + tl.load(tally + 2 * batch + seq)
    tl.store(next_tally + seq, live)
    tl.store(next_tally + batch + seq, saved)
    tl.store(next_tally + 2 * batch + seq, merged)


@triton.jit(do_not_specialize=["count"])
def _add(
    candidates, log_probs, roots, tokens, keys, goals, reads, chances, chance, reach, recent, tally,
    next_tokens, next_origin, next_chance, next_reach, next_recent, next_tally,
    count, c_seq, c_live, c_rank, l_seq, l_live, l_rank, siblings, sure,
    FIRST: tl.constexpr, LIVE: tl.constexpr, K: tl.constexpr, REPEAT: tl.constexpr, WIDTH: tl.constexpr,
    MOST: tl.constexpr, LIVE_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add the candidates of a level for one sequence, and store the nodes to read next."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    block: tl.constexpr = LIVE_BLOCK * RANK_BLOCK
    before: tl.constexpr = max(REPEAT, 0)  # tokens that are compared in addition to a candidate's own
    candidate = tl.arange(0, block)
    place, rank = candidate // RANK_BLOCK, candidate % RANK_BLOCK
    real = (place < LIVE) & (rank < K)
    node, number, readers = seq * LIVE + place, count + place * K + rank, count // K + LIVE
    keys, goals, reads, reach = keys + seq * MOST, goals + seq * MOST, reads + seq * MOST, reach + seq * readers

    path = tl.zeros([block], tl.float32)
    if not FIRST:
        path = tl.load(chance + node, mask=real, other=_NEVER)
    at_live = log_probs + seq * l_seq + place * l_live
    best = _finite(tl.load(at_live, mask=real, other=_NEVER).to(tl.float32))
    own = _finite(tl.load(at_live + rank * l_rank, mask=real, other=_NEVER).to(tl.float32))
    counts = (own >= best + siblings) & (own > _NEVER) & (path > _NEVER)
    own = tl.where(counts, own, _NEVER)
    token = tl.load(candidates + seq * c_seq + place * c_live + rank * c_rank, mask=real, other=0)
    key = _key(token, recent, roots, node, seq, real, before, FIRST)
    goal, twin, leads = number, candidate, tl.zeros([block], tl.int64)
    if REPEAT >= 0:
        goal, twin, leads = _goal(
            key, counts, place, keys, goals, reads, reach, count, FIRST, K, LIVE_BLOCK, RANK_BLOCK, DOUBLINGS
        )
    goal = tl.where(counts, goal, _NOWHERE)
    is_sure = counts & (own >= sure)
    whole = tl.where((goal == number) & is_sure, path + own, _NEVER)
    spot = _spot(whole, real, block)
    chosen = real & (spot < WIDTH)
    tl.store(tokens + seq * MOST + number, token, mask=real)
    tl.store(chances + seq * MOST + number, own, mask=real)
    tl.store(keys + number, key, mask=real)
    tl.store(goals + number, goal.to(tl.int64), mask=real)
    tl.store(reads + number, tl.where(chosen & (whole > _NEVER), readers + spot, _NOWHERE).to(tl.int64), mask=real)
    at_next = seq * WIDTH + spot
    tl.store(next_tokens + at_next, token, mask=chosen)
    tl.store(next_origin + at_next, place.to(tl.int64), mask=chosen)
    tl.store(next_chance + at_next, whole, mask=chosen)
    for i in tl.static_range(before):
        last = token
        if i < before - 1:
            last = _token_before(recent, roots, node, seq, real, i + 1, before, FIRST)
        tl.store(next_recent + at_next * before + i, last, mask=chosen)
    if REPEAT >= 0:
        at = tl.gather(spot, twin, 0)
        is_read = (goal >= count) & (at < WIDTH)
        bit = is_read.to(tl.int64) << tl.where(is_read, at, 0)
        next_reach += seq * (readers + WIDTH)
        _store_reach(reach, next_reach, leads, bit, readers, FIRST, LIVE_BLOCK, RANK_BLOCK, DOUBLINGS, WIDTH)
    live = tl.sum((real & (rank == 0) & (path > _NEVER)).to(tl.int64), 0)
    _count(tally, next_tally, seq, live, tl.sum((is_sure & (goal != number)).to(tl.int64), 0), FIRST)


# Unroll a tree -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["nowhere"])
def _unroll(
    tokens, goals, reads, chances, roots, tree_tokens, tree_parents, tree_chances, nowhere,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, MOST: tl.constexpr, NODES: tl.constexpr,
    LIVE_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Grow a tree on the graph of one sequence, continuing the best WIDTH nodes of every level. nowhere: the number of a
    node with nothing after it; nodes chosen last have larger numbers, since they were never read."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    block: tl.constexpr = LIVE_BLOCK * RANK_BLOCK
    candidate, live, out = tl.arange(0, block), tl.arange(0, LIVE_BLOCK), seq * NODES
    place, rank = candidate // RANK_BLOCK, candidate % RANK_BLOCK
    tl.store(tree_tokens + out, tl.load(roots + seq))
    tl.store(tree_parents + out, 0)
    tl.store(tree_chances + out, 0.0)
    at, chance, node = tl.where(live == 0, 0, nowhere), tl.where(live == 0, 0.0, _NEVER), live * 0
    first, count = 1, 1
    for _ in range(DEPTH):
        real = (place < count) & (rank < K)
        here = tl.gather(at, place, 0)
        known, at_candidate = real & (here < nowhere), seq * MOST + here * K + rank
        whole = _finite(tl.gather(chance, place, 0) + tl.load(chances + at_candidate, mask=known, other=_NEVER))
        goal = tl.load(goals + at_candidate, mask=known, other=_NOWHERE)
        number = tl.load(reads + seq * MOST + goal, mask=goal >= 0, other=nowhere).to(tl.int32)
        onward = tl.where((number >= 0) & (number < nowhere), number, nowhere)
        own = first + place * K + rank
        tl.store(tree_tokens + out + own, tl.load(tokens + at_candidate, mask=known, other=0), mask=real)
        tl.store(tree_parents + out + own, tl.gather(node, place, 0).to(tl.int64), mask=real)
        tl.store(tree_chances + out + own, whole, mask=real)
        taken = real[None, :] & (_spot(whole, real, block)[None, :] == live[:, None])
        at = tl.min(tl.where(taken, onward[None, :], nowhere), 1)
        chance = tl.max(tl.where(taken, whole[None, :], _NEVER), 1)
        node = tl.sum(tl.where(taken, own[None, :], 0), 1)
        first += count * K
        count = tl.minimum(count * K, WIDTH)


def room(depth: int, width: int, branch: int) -> int:
    """Return how many candidates `depth` levels have."""
    candidates, live = 0, 1
    for _ in range(depth):
        candidates += live * branch
        live = min(width, live * branch)
    return candidates


class KernelGraph:
    """`GrowingGraph` of ops/candidate_graphs.py, by kernels."""

    def __init__(self, root: Tensor, rule: Rule, depth: int) -> None:
        self.rule, self.root, self.count, self.live = rule, root, 0, 1
        batch, self.most = root.shape[0], room(depth, rule.width, rule.branch)
        self.known = torch.empty(4, batch, self.most, dtype=torch.long, device=root.device)
        self.chances = torch.empty(batch, self.most, dtype=torch.float32, device=root.device)
        self.chance = self.reach = self.recent = self.tally = root  # the first level has none
        # tally [3, b]: rows read, rows saved by merging, and the rows that the last level will add to the latter

    @property
    def candidates(self) -> GraphCandidates:
        tokens, keys, goals, reads = self.known[..., : self.count]
        return GraphCandidates(tokens, self.chances[:, : self.count], keys, goals, reads)

    @property
    def counts(self) -> Tensor:
        return self.tally[:2]

    def add(self, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        (batch, live, branch), rule, device = candidates.shape, self.rule, candidates.device
        assert log_probs.shape == candidates.shape and (live, branch) == (self.live, rule.branch)
        width, readers = min(rule.width, live * branch), self.count // branch + live
        tokens, origin = torch.empty(2, batch, width, dtype=torch.long, device=device)
        chance = torch.empty(batch, width, dtype=torch.float32, device=device)
        reach = torch.empty(batch, readers + width, dtype=torch.long, device=device)
        recent = torch.empty(batch, width, max(rule.repeat, 0), dtype=torch.long, device=device)
        tally = torch.empty(3, batch, dtype=torch.long, device=device)
        live_block, rank_block = triton.next_power_of_2(live), triton.next_power_of_2(branch)
        _add[(batch,)](
            candidates, log_probs, self.root, *self.known, self.chances, self.chance, self.reach, self.recent, self.tally,
            tokens, origin, chance, reach, recent, tally,
            self.count, *candidates.stride(), *log_probs.stride(), rule.log_siblings, rule.log_sure,
            FIRST=self.count == 0, LIVE=live, K=branch, REPEAT=rule.repeat, WIDTH=width, MOST=self.most,
            LIVE_BLOCK=live_block, RANK_BLOCK=rank_block, DOUBLINGS=(live - 1).bit_length(),
            **launched(device, min(8, live_block * rank_block // 8)),
        )  # fmt: skip
        self.count, self.live, self.tally = self.count + live * branch, width, tally
        self.chance, self.reach, self.recent = chance, reach, recent
        return tokens, origin

    def unrolled(
        self, state: Columns, depth: int, width: int, nodes: int, cost: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert cost is None, "rows are fixed where a round is captured"
        batch, branch, most = self.root.shape[0], self.rule.branch, 1 + room(depth, width, self.rule.branch)
        tokens, parents = torch.empty(2, batch, most, dtype=torch.long, device=self.root.device)
        chances = torch.empty(batch, most, dtype=torch.float32, device=self.root.device)
        known, _, goals, reads = self.known
        live_block, rank_block = triton.next_power_of_2(width), triton.next_power_of_2(branch)
        _unroll[(batch,)](
            known, goals, reads, self.chances, self.root, tokens, parents, chances, self.count // branch,
            DEPTH=depth, WIDTH=width, K=branch, MOST=self.most, NODES=most, LIVE_BLOCK=live_block, RANK_BLOCK=rank_block,
            **launched(self.root.device, min(8, live_block * rank_block // 16)),
        )  # fmt: skip
        return likeliest_nodes(state, tokens, parents, chances, nodes)
