"""Graphs of guesses: one launch for each level that is added, and two for the tree that is unrolled in the end.

In: the guesses behind the nodes that were read last, and their log-chances, [b, w, n] each. Out: the nodes to read next, and
in the end a draft. What is computed stands, as torch operations, in core/graphs.py. One program has a sequence;
guesses lie in buffers [b, M], level by level. Which of the w nodes somebody leads to are the bits of a number, so that at
most 64 nodes of a level are read. Of equal chances the first comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.growth import likeliest_nodes
from foreword.kernels.overlap import launched, take_turn
from foreword.kernels.settle import Columns

_NEVER = tl.constexpr(float("-inf"))
_NOWHERE = tl.constexpr(-1)
_MIX = tl.constexpr(0x5851F42D4C957F2D)  # as core/graphs.py has it
_PART = tl.constexpr(64)  # numbers that are compared with all others at a time, or fewer:
_PAIRS = tl.constexpr(8192)  # as many pairs as registers hold with ease


class Merging(NamedTuple):
    """`Rule` of core/graphs.py, its shares as logarithms."""

    branch: int
    repeat: int
    siblings: float
    sure: float
    width: int


# A level is added --------------------------------------------------------------------------------------------------------


@triton.jit
def _finite(chance):
    return tl.where(tl.abs(chance) < float("inf"), chance, _NEVER)


@triton.jit
def _both(one, other):
    return one | other


@triton.jit
def _united(bits):
    """All bits that stand in a row: [m, n] -> [m]."""
    return tl.reduce(bits, 1, _both)


@triton.jit
def _joined(one, other, COUNT: tl.constexpr):
    """Bits [n] and [COUNT], each who leads to whom: one after the other."""
    bit = tl.arange(0, COUNT)[None, :]
    return _united(tl.where(((one[:, None] >> bit) & 1) != 0, other[None, :], 0))


@triton.jit
def _closed(step, COUNT: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Who leads to whom in one step or more."""
    for _ in tl.static_range(DOUBLINGS):
        step |= _joined(step, step, COUNT)
    return step


@triton.jit
def _any(bits, LIVES: tl.constexpr, RANKS: tl.constexpr):
    """Of guesses [LIVES * RANKS] the bits that any behind the same node has: [LIVES]."""
    return _united(tl.reshape(bits, [LIVES, RANKS]))


@triton.jit
def _each(values, LIVES: tl.constexpr, RANKS: tl.constexpr):
    """What nodes [LIVES] have, for each of the guesses behind them."""
    return tl.reshape(tl.broadcast_to(values[:, None], [LIVES, RANKS]), [LIVES * RANKS])


@triton.jit
def _leads(reads, reach, guess, known):
    """To which nodes of the level older guesses lead: to none if they were not read."""
    number = tl.load(reads + guess, mask=known, other=_NOWHERE)
    return tl.load(reach + number, mask=number >= 0, other=0)


@triton.jit
def _older(key, place, keys, goals, reads, reach, count, BLOCK: tl.constexpr):
    """The first older node with the same last tokens that does not lead back; `count` where there is none."""
    found = tl.zeros([BLOCK], tl.int32) + count
    part: tl.constexpr = min(_PART, _PAIRS // BLOCK)
    for start in range(0, count, part):
        other = start + tl.arange(0, part)
        known = other < count
        is_node = known & (tl.load(goals + other, mask=known, other=_NOWHERE) == other)
        same = key[:, None] == tl.load(keys + other, mask=known, other=0)[None, :]
        back = (_leads(reads, reach, other, known)[None, :] >> place[:, None]) & 1
        fits = same & is_node[None, :] & (back == 0)
        found = tl.minimum(found, tl.min(tl.where(fits, other[None, :], count), 1))
    return found


@triton.jit
def _closing(leads, LIVES: tl.constexpr, RANKS: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Which aliases close a loop together with others of the level and do not lead to a later node of it."""
    closed = _closed(_any(leads, LIVES, RANKS), LIVES, DOUBLINGS)
    own, other = tl.arange(0, LIVES)[:, None], tl.arange(0, LIVES)[None, :]
    returns = ((closed[None, :] >> own) & 1) << other
    refused = _united(tl.where(other <= own, returns, 0))
    return (leads & _each(refused, LIVES, RANKS)) != 0


@triton.jit
def _twin(key, free, BLOCK: tl.constexpr):
    """The first free guess of the level with the same last tokens."""
    found = tl.full([BLOCK], BLOCK - 1, tl.int32)
    part: tl.constexpr = min(BLOCK, _PART, _PAIRS // BLOCK)
    for start in range(0, BLOCK, part):
        other = start + tl.arange(0, part)
        is_free = tl.gather(free.to(tl.int32), other, 0) != 0
        fits = (key[:, None] == tl.gather(key, other, 0)[None, :]) & is_free[None, :]
        found = tl.minimum(found, tl.min(tl.where(fits, other[None, :], BLOCK - 1), 1))
    return found


@triton.jit
def _spot(whole, real, BLOCK: tl.constexpr):
    """How many guesses come before each: those likelier, and of those as likely the earlier ones."""
    own = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    part: tl.constexpr = min(BLOCK, _PART, _PAIRS // BLOCK)
    for start in range(0, BLOCK, part):
        other = start + tl.arange(0, part)
        theirs, counts = tl.gather(whole, other, 0)[None, :], tl.gather(real.to(tl.int32), other, 0)[None, :] != 0
        before = (theirs > whole[:, None]) | ((theirs == whole[:, None]) & (other[None, :] < own[:, None]))
        found += tl.sum((before & counts).to(tl.int32), 1)
    return found


@triton.jit
def _hand_on(
    reach, on_reach, leads, bit, readers,
    FIRST: tl.constexpr, LIVES: tl.constexpr, RANKS: tl.constexpr, DOUBLINGS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Who leads to the nodes to read next: whoever leads to a node with an edge there, by new aliases too."""
    itself = tl.full([LIVES], 1, tl.int64) << tl.arange(0, LIVES)
    step = _closed(_any(leads, LIVES, RANKS), LIVES, DOUBLINGS) | itself
    onward = _joined(step, _any(bit, LIVES, RANKS), LIVES)
    for start in range(0, readers, _PART):
        reader = start + tl.arange(0, _PART)
        known = reader < readers
        before = tl.full([_PART], 1, tl.int64) if FIRST else tl.load(reach + reader, mask=known, other=0)
        tl.store(on_reach + reader, _joined(before, onward, LIVES), mask=known)
    new = tl.arange(0, triton.next_power_of_2(WIDTH))
    tl.store(on_reach + readers + new, (new * 0 + 1).to(tl.int64) << new, mask=new < WIDTH)


@triton.jit
def _token_before(recent, roots, node, lane, real, i, BEFORE: tl.constexpr, FIRST: tl.constexpr):
    """Token i of the last BEFORE that led to a node: behind the root alone, the root and nothing before it."""
    if not FIRST:
        return tl.load(recent + node * BEFORE + i, mask=real, other=_NOWHERE)
    elif i == BEFORE - 1:
        return node * 0 + tl.load(roots + lane)
    else:
        return node * 0 + _NOWHERE


@triton.jit
def _key(token, recent, roots, node, lane, real, BEFORE: tl.constexpr, FIRST: tl.constexpr):
    key = token * 0
    for i in tl.static_range(BEFORE):
        key = key * _MIX + _token_before(recent, roots, node, lane, real, i, BEFORE, FIRST) + 1
    return key * _MIX + token + 1


@triton.jit
def _goal(
    key, counts, place, keys, goals, reads, reach, count,
    FIRST: tl.constexpr, K: tl.constexpr, LIVES: tl.constexpr, RANKS: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """What every guess that counts leads to: an older node, the first guess of the level that ends like it, or itself.
    That guess, where it is no older one; and to which nodes of this level an older one leads on."""
    block: tl.constexpr = LIVES * RANKS
    older, found, leads = place * 0 + count, place < 0, tl.zeros([block], tl.int64)
    if not FIRST:
        older = _older(key, place, keys, goals, reads, reach, count, block)
        found = (older < count) & counts
        leads = _leads(reads, reach, older, found)
        found = found & ~_closing(leads, LIVES, RANKS, DOUBLINGS)
        leads = tl.where(found, leads, 0)
    twin = _twin(key, counts & ~found, block)
    return tl.where(found, older, count + twin // RANKS * K + twin % RANKS), twin, leads


@triton.jit
def _count(tally, on_tally, lane, live, merged, FIRST: tl.constexpr) -> None:
    """Rows that were read so far, those that were not because they were merged, and what this level adds to these."""
    lanes, saved = tl.num_programs(0), tl.zeros([], tl.int64)
    if not FIRST:
        live += tl.load(tally + lane)
        saved = tl.load(tally + lanes + lane) + tl.load(tally + 2 * lanes + lane)
    tl.store(on_tally + lane, live)
    tl.store(on_tally + lanes + lane, saved)
    tl.store(on_tally + 2 * lanes + lane, merged)


@triton.jit(do_not_specialize=["count"])
def _add(
    guessed, likely, roots, tokens, keys, goals, reads, chances, chance, reach, recent, tally,
    on_tokens, on_origin, on_chance, on_reach, on_recent, on_tally,
    count, g_lane, g_live, g_rank, l_lane, l_live, l_rank, siblings, sure,
    FIRST: tl.constexpr, LIVE: tl.constexpr, K: tl.constexpr, REPEAT: tl.constexpr, WIDTH: tl.constexpr,
    MOST: tl.constexpr, LIVES: tl.constexpr, RANKS: tl.constexpr, DOUBLINGS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One sequence: add the guesses of a level, and name the nodes to read next."""
    take_turn(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    block: tl.constexpr = LIVES * RANKS
    before: tl.constexpr = max(REPEAT, 0)  # tokens that are compared beside a guess's own
    guess = tl.arange(0, block)
    place, rank = guess // RANKS, guess % RANKS
    real = (place < LIVE) & (rank < K)
    node, number, readers = lane * LIVE + place, count + place * K + rank, count // K + LIVE
    keys, goals, reads, reach = keys + lane * MOST, goals + lane * MOST, reads + lane * MOST, reach + lane * readers

    way = tl.zeros([block], tl.float32)
    if not FIRST:
        way = tl.load(chance + node, mask=real, other=_NEVER)
    behind = likely + lane * l_lane + place * l_live
    best = _finite(tl.load(behind, mask=real, other=_NEVER).to(tl.float32))
    own = _finite(tl.load(behind + rank * l_rank, mask=real, other=_NEVER).to(tl.float32))
    counts = (own >= best + siblings) & (own > _NEVER) & (way > _NEVER)
    own = tl.where(counts, own, _NEVER)

    token = tl.load(guessed + lane * g_lane + place * g_live + rank * g_rank, mask=real, other=0)
    key = _key(token, recent, roots, node, lane, real, before, FIRST)
    goal, twin, leads = number, guess, tl.zeros([block], tl.int64)
    if REPEAT >= 0:
        goal, twin, leads = _goal(key, counts, place, keys, goals, reads, reach, count, FIRST, K, LIVES, RANKS, DOUBLINGS)
    goal = tl.where(counts, goal, _NOWHERE)

    is_sure = counts & (own >= sure)
    whole = tl.where((goal == number) & is_sure, way + own, _NEVER)
    spot = _spot(whole, real, block)
    chosen = real & (spot < WIDTH)
    tl.store(tokens + lane * MOST + number, token, mask=real)
    tl.store(chances + lane * MOST + number, own, mask=real)
    tl.store(keys + number, key, mask=real)
    tl.store(goals + number, goal.to(tl.int64), mask=real)
    tl.store(reads + number, tl.where(chosen & (whole > _NEVER), readers + spot, _NOWHERE).to(tl.int64), mask=real)
    on = lane * WIDTH + spot
    tl.store(on_tokens + on, token, mask=chosen)
    tl.store(on_origin + on, place.to(tl.int64), mask=chosen)
    tl.store(on_chance + on, whole, mask=chosen)
    for i in tl.static_range(before):
        last = token
        if i < before - 1:
            last = _token_before(recent, roots, node, lane, real, i + 1, before, FIRST)
        tl.store(on_recent + on * before + i, last, mask=chosen)
    if REPEAT >= 0:
        at = tl.gather(spot, twin, 0)
        is_read = (goal >= count) & (at < WIDTH)
        bit = is_read.to(tl.int64) << tl.where(is_read, at, 0)
        on_reach += lane * (readers + WIDTH)
        _hand_on(reach, on_reach, leads, bit, readers, FIRST, LIVES, RANKS, DOUBLINGS, WIDTH)
    live = tl.sum((real & (rank == 0) & (way > _NEVER)).to(tl.int64), 0)
    _count(tally, on_tally, lane, live, tl.sum((is_sure & (goal != number)).to(tl.int64), 0), FIRST)


# A tree is unrolled ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["nowhere"])
def _unroll(
    tokens, goals, reads, chances, roots, on_tokens, on_parents, on_chances, nowhere,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, MOST: tl.constexpr, NODES: tl.constexpr,
    LIVES: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One sequence: grow a tree on what may follow what, of every level the best WIDTH nodes. `nowhere`: the number of a
    node with nothing behind it; those chosen last have larger ones, since they were not read any more."""
    take_turn(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    block: tl.constexpr = LIVES * RANKS
    guess, live, out = tl.arange(0, block), tl.arange(0, LIVES), lane * NODES
    place, rank = guess // RANKS, guess % RANKS
    tl.store(on_tokens + out, tl.load(roots + lane))
    tl.store(on_parents + out, 0)
    tl.store(on_chances + out, 0.0)
    at, chance, node = tl.where(live == 0, 0, nowhere), tl.where(live == 0, 0.0, _NEVER), live * 0
    first, count = 1, 1
    for _ in range(DEPTH):
        real = (place < count) & (rank < K)
        here = tl.gather(at, place, 0)
        known, behind = real & (here < nowhere), lane * MOST + here * K + rank
        whole = _finite(tl.gather(chance, place, 0) + tl.load(chances + behind, mask=known, other=_NEVER))
        goal = tl.load(goals + behind, mask=known, other=_NOWHERE)
        number = tl.load(reads + lane * MOST + goal, mask=goal >= 0, other=nowhere).to(tl.int32)
        onward = tl.where((number >= 0) & (number < nowhere), number, nowhere)
        own = first + place * K + rank
        tl.store(on_tokens + out + own, tl.load(tokens + behind, mask=known, other=0), mask=real)
        tl.store(on_parents + out + own, tl.gather(node, place, 0).to(tl.int64), mask=real)
        tl.store(on_chances + out + own, whole, mask=real)
        taken = real[None, :] & (_spot(whole, real, block)[None, :] == live[:, None])
        at = tl.min(tl.where(taken, onward[None, :], nowhere), 1)
        chance = tl.max(tl.where(taken, whole[None, :], _NEVER), 1)
        node = tl.sum(tl.where(taken, own[None, :], 0), 1)
        first += count * K
        count = tl.minimum(count * K, WIDTH)


def room(depth: int, width: int, branch: int) -> int:
    """How many guesses so many levels have."""
    guesses, live = 0, 1
    for _ in range(depth):
        guesses += live * branch
        live = min(width, live * branch)
    return guesses


class Merged:
    """Graphs of some sequences while they grow: `add` for each of `depth` levels, then `unrolled`. `root`: [b]."""

    def __init__(self, rule: Merging, root: Tensor, depth: int) -> None:
        self.rule, self.root, self.count, self.live = rule, root, 0, 1
        lanes, self.most = root.shape[0], room(depth, rule.width, rule.branch)
        self.known = torch.empty(4, lanes, self.most, dtype=torch.long, device=root.device)
        self.chances = torch.empty(lanes, self.most, dtype=torch.float32, device=root.device)
        self.chance = self.reach = self.recent = self.tally = root  # the first level has none
        # `tally` [3, b]: rows that were read, and that were merged instead, and what the last level adds to the latter

    @property
    def guesses(self) -> tuple[Tensor, ...]:
        """Those found so far [b, M]: tokens, log-chances, keys, goals and reads, as core/graphs.py has them."""
        tokens, keys, goals, reads = self.known[..., : self.count]
        return tokens, self.chances[:, : self.count], keys, goals, reads

    def add(self, guessed: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
        (lanes, live, branch), rule, device = guessed.shape, self.rule, guessed.device
        assert likely.shape == guessed.shape and (live, branch) == (self.live, rule.branch)
        width, readers = min(rule.width, live * branch), self.count // branch + live
        tokens, origin = torch.empty(2, lanes, width, dtype=torch.long, device=device)
        chance = torch.empty(lanes, width, dtype=torch.float32, device=device)
        reach = torch.empty(lanes, readers + width, dtype=torch.long, device=device)
        recent = torch.empty(lanes, width, max(rule.repeat, 0), dtype=torch.long, device=device)
        tally = torch.empty(3, lanes, dtype=torch.long, device=device)
        lives, ranks = triton.next_power_of_2(live), triton.next_power_of_2(branch)
        _add[(lanes,)](
            guessed, likely, self.root, *self.known, self.chances, self.chance, self.reach, self.recent, self.tally,
            tokens, origin, chance, reach, recent, tally,
            self.count, *guessed.stride(), *likely.stride(), rule.siblings, rule.sure,
            FIRST=self.count == 0, LIVE=live, K=branch, REPEAT=rule.repeat, WIDTH=width, MOST=self.most,
            LIVES=lives, RANKS=ranks, DOUBLINGS=(live - 1).bit_length(), **launched(device, min(8, lives * ranks // 8)),
        )  # fmt: skip
        self.count, self.live, self.tally = self.count + live * branch, width, tally
        self.chance, self.reach, self.recent = chance, reach, recent
        return tokens, origin

    def unrolled(self, state: Columns, depth: int, width: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """The draft of the likeliest walks, of at most `depth` levels and `nodes` rows: tokens and parents [b, nodes], and
        sizes [b]. `width` nodes of a level are gone on from."""
        lanes, branch, most = self.root.shape[0], self.rule.branch, 1 + room(depth, width, self.rule.branch)
        tokens, parents = torch.empty(2, lanes, most, dtype=torch.long, device=self.root.device)
        chances = torch.empty(lanes, most, dtype=torch.float32, device=self.root.device)
        known, _, goals, reads = self.known
        lives, ranks = triton.next_power_of_2(width), triton.next_power_of_2(branch)
        _unroll[(lanes,)](
            known, goals, reads, self.chances, self.root, tokens, parents, chances, self.count // branch,
            DEPTH=depth, WIDTH=width, K=branch, MOST=self.most, NODES=most, LIVES=lives, RANKS=ranks,
            **launched(self.root.device, min(8, lives * ranks // 16)),
        )  # fmt: skip
        return likeliest_nodes(state, tokens, parents, chances, nodes)
