"""Graphs of guesses: one launch for each level that is added, and one for each level of a tree that is unrolled.

In: the guesses behind the nodes that were read last, and their log-chances, [b, w, n] each. Out: the nodes to read next, and
in the end what may follow what. What is computed stands, as torch operations, in core/graphs.py. One program has a sequence;
guesses lie in buffers [b, M], level by level. Which of the w nodes somebody leads to are the bits of a number, so that at
most 64 nodes of a level are read. Of equal chances the first comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.overlap import launched, take_turn

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
def _walk(
    tokens, goals, reads, chances, at, live, origin, on_at, on_tokens, on_chances, nowhere,
    SECOND: tl.constexpr, ABOVE: tl.constexpr, LIVE: tl.constexpr, K: tl.constexpr, MOST: tl.constexpr,
    LIVES: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One sequence: from the nodes that a tree's live nodes hang on to those that they stand for, and what may follow."""
    take_turn(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    own = lane * MOST
    place, rank = tl.arange(0, LIVES), tl.arange(0, RANKS)[None, :]
    real = place < LIVE
    above = tl.zeros([LIVES], tl.int64)
    if not SECOND:
        above = tl.load(at + lane * ABOVE + tl.load(origin + lane * LIVE + place, mask=real, other=0), mask=real, other=0)
    known = real & (above < nowhere)
    token = tl.load(live + lane * LIVE + place, mask=real, other=0)
    siblings = known[:, None] & (rank < K)
    said = tl.load(tokens + own + above[:, None] * K + rank, mask=siblings, other=0)
    taken = tl.min(tl.where(siblings & (said == token[:, None]), rank, RANKS), 1)
    guess = above * K + tl.where(taken < RANKS, taken, 0)
    goal = tl.load(goals + own + guess, mask=known, other=_NOWHERE)
    number = tl.load(reads + own + goal, mask=goal >= 0, other=_NOWHERE)
    here = tl.where((number >= 0) & (number < nowhere), number, nowhere)  # those chosen last are not read any more
    tl.store(on_at + lane * LIVE + place, here, mask=real)
    behind, out = here[:, None] * K + rank, (lane * LIVE + place)[:, None] * K + rank
    follows, written = (here < nowhere)[:, None] & (rank < K), real[:, None] & (rank < K)
    tl.store(on_tokens + out, tl.load(tokens + own + behind, mask=follows, other=0), mask=written)
    tl.store(on_chances + out, tl.load(chances + own + behind, mask=follows, other=_NEVER), mask=written)


class Merged:
    """Graphs of some sequences while they grow: `add` for each of `depth` levels, then `walks`. `root`: [b]."""

    def __init__(self, rule: Merging, root: Tensor, depth: int) -> None:
        self.rule, self.root, self.count, self.live = rule, root, 0, 1
        lanes, self.most = root.shape[0], self._room(depth)
        self.known = torch.empty(4, lanes, self.most, dtype=torch.long, device=root.device)
        self.chances = torch.empty(lanes, self.most, dtype=torch.float32, device=root.device)
        self.chance = self.reach = self.recent = self.tally = root  # the first level has none

    def _room(self, depth: int) -> int:
        room, live = 0, 1
        for _ in range(depth):
            room += live * self.rule.branch
            live = min(self.rule.width, live * self.rule.branch)
        return room

    @property
    def guesses(self) -> tuple[Tensor, ...]:
        """Those found so far [b, M]: tokens, log-chances, keys, goals and reads, as core/graphs.py has them."""
        tokens, keys, goals, reads = self.known[..., : self.count]
        return tokens, self.chances[:, : self.count], keys, goals, reads

    @property
    def counts(self) -> Tensor:
        return self.tally[:2]

    @property
    def saved(self) -> Tensor:
        return self.tally[2]

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

    def walks(self) -> Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What may follow what, level by level."""
        branch, at = self.rule.branch, self.root

        def guess(level: int, live: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal at
            if level == 1:
                return self.known[0, :, None, :branch], self.chances[:, None, :branch]
            tokens, chances, at = self._walked(level, at, live, origin)
            return tokens, chances

        return guess

    def _walked(self, level: int, at: Tensor, live: Tensor, origin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (lanes, count), branch = live.shape, self.rule.branch
        tokens = torch.empty(lanes, count, branch, dtype=torch.long, device=live.device)
        chances = torch.empty(tokens.shape, dtype=torch.float32, device=live.device)
        on_at = torch.empty_like(live, memory_format=torch.contiguous_format)
        known, goals, reads = self.known[0], self.known[2], self.known[3]
        lives, ranks = triton.next_power_of_2(count), triton.next_power_of_2(branch)
        _walk[(lanes,)](
            known, goals, reads, self.chances, at, live.contiguous(), origin.contiguous(), on_at, tokens, chances,
            self.count // branch, SECOND=level == 2, ABOVE=at.shape[-1], LIVE=count, K=branch, MOST=self.most,
            LIVES=lives, RANKS=ranks, **launched(live.device, min(4, lives * ranks // 32)),
        )  # fmt: skip
        return tokens, chances, on_at
