"""Tree attention as a Triton kernel, for CUDA: the keys are split over programs, and the tree's few rows come with them.

Masked attention of torch builds a mask over every key and reads it in every layer. Here a program takes one key head of one
sequence, a block of the queries that share it, and its share of the keys; it looks at `sees` only where that share reaches
the scratch rows, and of a chain, as prompts are, not even there. It stops at the sequence's own length, and at the last row
that its queries can see. A second kernel joins the shares, where there are several.
The reference is `attention.attend`; tests hold the two together, on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.held import folded
from foreword.ops.layer.overlap import early_launch, overlaps, take_turn

PROGRAMS = 132  # as many programs as keep a large GPU busy: one on each of its multiprocessors
CROWD = 24  # units, beyond which they share the machine, and the least share is longer
MANY = 128  # rows: more have prompts alone, and are programs enough, unless what stands before them is long
SHARE, LONG_SHARE = 64, 512  # keys, at the least; of many rows
UNSHARED = 2048  # keys that a program reads by itself where units alone keep the GPU busy: joining costs more than it brings
MOST_SHARES = 15  # of the prefix; more cost more to join than they save
SPAN_STEP = 256  # shares change when a text grows by this much, and not before
LOG2E = math.log2(math.e)  # the hardware's exponential is that of 2
LOWEST = tl.constexpr(-1e30)  # below every score, and finite: the difference of two infinities is not a number


@dataclass(frozen=True)
class AttentionTiles:
    """How the work is cut: queries and keys that a program takes at a time, its warps, loads in flight, shares of all keys.

    Of several `splits`, the last is the scratch rows, and the others are the prefix; `least`: keys that a share of it has at
    least, so that short texts have fewer. `shares`: how many warps share the keys that a program takes at a time."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    splits: int
    shares: int = 1
    least: int = 0

    def __post_init__(self) -> None:
        assert self.least % self.block_k == 0, "shares are whole blocks: of what lies behind one, nothing would be masked"


def attention_tiles(queries: int, keys: int, units: int, width: int, item: int = 2, many: bool = False) -> AttentionTiles:
    """For `queries` that share a key head and up to `keys` keys, in `units` (sequences x key heads), `item` bytes a number.
    `many`: they are of a prompt.

    How the keys are cut must not depend on the queries of a tree: see `_prefix`. That warps share them changes only the
    order of sums.
    """
    block_k, busy = 64 if width * item <= 256 else 32, units >= PROGRAMS
    least = max(SHARE * units // CROWD, UNSHARED if busy else LONG_SHARE if many else SHARE)
    least = triton.cdiv(least, block_k) * block_k
    shares = min(triton.cdiv(keys, least), MOST_SHARES)
    splits = shares + 1 if shares > 1 else 1
    if busy:
        block_q = 16 if queries <= 16 else 64  # 32 would not be enough for the larger matrix instruction
    else:
        narrow = units * splits * triton.cdiv(queries, 16) <= 4 * PROGRAMS  # else keys would be read too often
        block_q = 16 if narrow else min(max(16, triton.next_power_of_2(queries)), 64)
    if width * item > 256:
        return AttentionTiles(block_q, block_k, 8, 2, splits, least=least)
    stages, sharing = 2 if block_q == 16 else 3, 4 if block_q == 16 and item == 2 else 1
    return AttentionTiles(block_q, block_k, 4, stages, splits, sharing, least)


@triton.jit
def _numbers(BLOCK_K: tl.constexpr, SHARES: tl.constexpr):
    """Of the keys of a block: [BLOCK_K], or [SHARES, as many as a warp takes]."""
    if SHARES == 1:
        return tl.arange(0, BLOCK_K)
    else:
        each: tl.constexpr = BLOCK_K // SHARES
        return tl.arange(0, SHARES)[:, None] * each + tl.arange(0, each)[None, :]


@triton.jit
def _nothing_yet(BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """A softmax that has seen no key: the best score, the weights' sum and the weighted values."""
    best = tl.full([BLOCK_Q], LOWEST, tl.float32)
    if SHARES == 1:
        return best, tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    else:
        return best, tl.zeros([SHARES, BLOCK_Q], tl.float32), tl.zeros([SHARES, BLOCK_Q, WIDTH], tl.float32)


@triton.jit
def _fold(
    best, total, mixed, q, k, v, open_, inner, factor,
    SHARES: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys into the running softmax: the best score so far, the weights' sum and the weighted values.

    Where warps share the keys, each has a sum and values of its own; the best score is that of all, so that weights are
    rounded as they are where nobody shares."""
    last: tl.constexpr = 1 if SHARES == 1 else 2
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        score = 1.0 - 2.0 / (1.0 + tl.exp2(score * inner))  # tanh
    if MASKED:
        score = tl.where(open_, score, float("-inf"))
    highest = tl.max(score, last)
    if SHARES > 1:
        highest = tl.max(highest, 0)
    peak = tl.maximum(best, highest * factor)
    fade = tl.exp2(best - peak)
    chance = tl.exp2(score * factor - peak[:, None])
    total = total * fade + tl.sum(chance, last)
    mixed = mixed * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision=PRECISION)
    return peak, total, mixed


@triton.jit
def _of_all(total, mixed, BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """What warps that share the keys have of a softmax, together."""
    if SHARES > 1:
        total = tl.reshape(folded(tl.expand_dims(total, 2), BLOCK_Q, 1, SHARES), (BLOCK_Q,))
        mixed = folded(mixed, BLOCK_Q, WIDTH, SHARES)
    return total, mixed


@triton.jit
def _open(
    sees, real, row, away, nearest, first, scratch, s_row, s_column, CHAIN: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Which of a block's keys each query sees, where the block reaches the scratch; `away` [.., 1, keys] counts from its
    first row, and the queries' rows from the `first` of the pass."""
    seen = away <= tl.minimum(first + row, scratch - 1)[:, None] if CHAIN else away < 0
    if WINDOW > 0:
        seen = seen & (away >= nearest[:, None])
    if not CHAIN:
        in_tree = real[:, None] & (away >= 0) & (away < scratch)
        seen = seen | (tl.load(sees + row[:, None] * s_row + away * s_column, mask=in_tree, other=0) != 0)
    return seen


@triton.jit
def _rest(
    best, total, mixed, q, key_at, value_at, tile, c_row, sees, s_row, s_column, real, row, nearest, block,
    later, seen_by_all, stop, length, first_row, inner, factor,
    BLOCK_K: tl.constexpr, SHARES: tl.constexpr, CHAIN: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a share has behind its first block: whole blocks that all see, but for a window, then those that some do not."""
    last: tl.constexpr = 1 if SHARES == 1 else 2
    unmasked = later + tl.maximum(seen_by_all - later, 0) // BLOCK_K * BLOCK_K
    away = tl.expand_dims(block, last - 1) - length
    for start in range(later, unmasked, BLOCK_K):
        k = tl.load(key_at + start * c_row + tile)
        v = tl.load(value_at + start * c_row + tile)
        open_ = start + away >= nearest[:, None]
        best, total, mixed = _fold(
            best, total, mixed, q, k, v, open_, inner, factor, SHARES, WINDOW > 0, CAPPED, PRECISION
        )  # fmt: skip
    for start in range(unmasked, stop, BLOCK_K):
        here = tl.expand_dims(start + block < stop, last)
        k = tl.load(key_at + start * c_row + tile, mask=here, other=0.0)
        v = tl.load(value_at + start * c_row + tile, mask=here, other=0.0)
        open_ = _open(sees, real, row, start + away, nearest, first_row, stop - length, s_row, s_column, CHAIN, WINDOW)
        best, total, mixed = _fold(best, total, mixed, q, k, v, open_, inner, factor, SHARES, True, CAPPED, PRECISION)
    return best, total, mixed


@triton.jit
def _prefix(length, splits, least, BLOCK_K: tl.constexpr, WINDOW: tl.constexpr):
    """Where the prefix begins that anybody sees, and how much of it is a share. It is cut the same for any number of rows,
    so that a row is rounded alike alone and among others. Of several shares the last has none: it is for the scratch."""
    origin = tl.maximum(length - WINDOW + 1, 0) if WINDOW > 0 else 0  # a deeper row's window begins later
    return origin, tl.maximum(least, tl.cdiv(tl.cdiv(length - origin, tl.maximum(splits - 1, 1)), BLOCK_K) * BLOCK_K)


@triton.jit
def _stops(begin, length, rows, scratch, cached, BLOCK_Q: tl.constexpr, CHAIN: tl.constexpr, CAUSAL: tl.constexpr):
    """Up to where any of a block's queries sees the scratch, and up to where all do. In a causal pass no row sees a later
    one, and in a chain each sees all before it. Padding may lie beyond what is cached."""
    lowest, first_row = begin % rows, scratch - rows
    stop = tl.minimum(length + scratch, cached)
    if CAUSAL:
        stop = tl.minimum(length + first_row + tl.minimum(lowest + BLOCK_Q, rows), cached)
    seen_by_all = length
    if CHAIN:
        lowest = tl.where(lowest + BLOCK_Q > rows, 0, lowest)  # the block goes on with another head's first row
        seen_by_all = tl.minimum(length + first_row + lowest + 1, stop)
    return stop, seen_by_all


@triton.jit
def _put(out, peaks, totals, place, best, total, mixed, real, WIDTH: tl.constexpr, JOINED: tl.constexpr):
    """A softmax to its place: divided by the weights' sum, or beside its best score and that sum where shares are joined."""
    if JOINED:
        tl.store(peaks + place // WIDTH, best, mask=real)
        tl.store(totals + place // WIDTH, total, mask=real)
    else:
        mixed /= tl.maximum(total, 1e-37)[:, None]  # a row that sees nothing has no weight, and no division by zero
    tl.store(out + place[:, None] + tl.arange(0, WIDTH)[None, :], mixed, mask=real[:, None])


VARIES = ["s_batch", "s_row", "d_batch", "o_split", "rows", "scratch", "cached", "heads", "queries", "splits", "least"]


@triton.jit(do_not_specialize=VARIES)
def _attend(
    query, keys, values, slots, base, sees, depth, out, peaks, totals, inner, factor,
    q_batch, q_head, q_row, c_slot, c_head, c_row, s_batch, s_row, s_column, d_batch, o_split, o_batch, o_row, o_head,
    rows, scratch, cached, heads, queries, splits, least,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SHARES: tl.constexpr,
    CHAIN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, JOINED: tl.constexpr,
    EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one block of queries over one share of the keys."""
    head, split = tl.program_id(0) % heads, tl.program_id(2)
    seq = (tl.program_id(0) // heads).to(tl.int64)
    slot = tl.load(slots + seq)
    length = tl.load(base + seq).to(tl.int32)
    at = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    group, row, real = at // rows, at % rows, at < queries
    wide, block = tl.arange(0, WIDTH), _numbers(BLOCK_K, SHARES)
    last: tl.constexpr = 1 if SHARES == 1 else 2  # the axis of a key's numbers, and the one behind that of keys

    origin, share = _prefix(length, splits, least, BLOCK_K, WINDOW)
    first = tl.minimum(origin + split * share, length)
    prefix_stop = tl.minimum(first + share, length)
    if (first == length) & (split < splits - 1):
        return  # a text too short for so many shares; whoever joins them knows
    nearest = row
    if WINDOW > 0:
        nearest = tl.load(depth + seq * d_batch + row) - (WINDOW - 1)
    stop, seen_by_all, first_row = prefix_stop, prefix_stop, scratch - rows
    if split == splits - 1:
        stop, seen_by_all = _stops(tl.program_id(1) * BLOCK_Q, length, rows, scratch, cached, BLOCK_Q, CHAIN, CAUSAL)

    # The first block: what is older than the kernel before, and so are `sees`, is asked for before the turn.
    tile = tl.expand_dims(block, last) * c_row + wide
    key_at, value_at = keys + slot * c_slot + head * c_head, values + slot * c_slot + head * c_head
    at_key = tl.expand_dims(first + block, last)
    old, young = at_key < prefix_stop, (at_key >= length) & (at_key < stop)
    key = tl.load(key_at + first * c_row + tile, mask=old, other=0.0)
    value = tl.load(value_at + first * c_row + tile, mask=old, other=0.0)
    sees += seq * s_batch
    away = tl.expand_dims(first + block, last - 1) - length
    seen = _open(sees, real, row, away, nearest, first_row, stop - length, s_row, s_column, CHAIN, WINDOW)
    take_turn(EARLY)
    new_key = tl.load(key_at + first * c_row + tile, mask=young, other=0.0)
    new_value = tl.load(value_at + first * c_row + tile, mask=young, other=0.0)
    q_at = (head * GROUPS + group) * q_head + row * q_row
    q = tl.load(query + seq * q_batch + q_at[:, None] + wide[None, :], mask=real[:, None], other=0.0)
    key, value = tl.where(young, new_key, key), tl.where(young, new_value, value)
    if SHARES > 1:
        q = tl.broadcast_to(q[None, :, :], (SHARES, BLOCK_Q, WIDTH))
    best, total, mixed = _nothing_yet(BLOCK_Q, WIDTH, SHARES)
    best, total, mixed = _fold(best, total, mixed, q, key, value, seen, inner, factor, SHARES, True, CAPPED, PRECISION)
    if first + BLOCK_K < stop:
        best, total, mixed = _rest(
            best, total, mixed, q, key_at, value_at, tile, c_row, sees, s_row, s_column, real, row, nearest, block,
            first + BLOCK_K, seen_by_all, stop, length, first_row, inner, factor,
            BLOCK_K, SHARES, CHAIN, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
    total, mixed = _of_all(total, mixed, BLOCK_Q, WIDTH, SHARES)

    place = split.to(tl.int64) * o_split + seq * o_batch + row * o_row + (head * GROUPS + group) * o_head
    _put(out, peaks, totals, place, best, total, mixed, real, WIDTH, JOINED)


@triton.jit(do_not_specialize=["answers", "splits", "least", "each"])
def _join(
    parts, peaks, totals, base, out, answers, splits, least, each,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row of the result: its shares, each counting as much as it holds of the softmax. A sequence has `each` rows."""
    answer = tl.program_id(0).to(tl.int64)
    split, wide = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    length = tl.load(base + answer // each).to(tl.int32)
    origin, share = _prefix(length, splits, least, BLOCK_K, WINDOW)
    here = ((split < splits - 1) & (origin + split * share < length)) | (split == splits - 1)
    place = split * answers + answer
    take_turn(EARLY)
    pieces = tl.load(parts + place[:, None] * WIDTH + wide[None, :], mask=here[:, None], other=0.0)
    peak = tl.load(peaks + place, mask=here, other=LOWEST)
    part = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(totals + place, mask=here, other=0.0) * part, 0)
    tl.store(out + answer * WIDTH + wide, tl.sum(pieces * part[:, None], 0) / tl.maximum(total, 1e-37))


def attend_tree(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    base: Tensor,
    sees: Tensor,
    span: int,
    scaling: float,
    depth: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    chain: bool = False,
    tiles: AttentionTiles | None = None,
    causal: bool = True,
) -> Tensor:
    """query [b, heads, n, width] over the cache's keys and values [B, key heads, rows, width]: [b, n, heads, width].

    `base` [b] counts each slot's committed rows, at most `span`; `sees` [b or 1, n, m] is over the m scratch rows behind,
    the last n of which are those of the pass. Where the pass is `causal` no row sees a later one, whatever `sees` says; say
    `causal=False` of a block whose rows see each other. In a `chain` every row sees all before it.
    With a `window`, a row sees the last `window` positions only, its own among them: `depth` [b or 1, n] places the rows
    behind `base`, and `sees` must already be closed where scratch rows lie outside. `softcap` bounds the scores.
    All but the queries and the scratch rows must be older than the kernel before: see ops/layer/overlap.py.
    """
    assert causal or not chain, "a chain is causal"
    batch, all_heads, rows, width = query.shape
    heads, scratch = keys.shape[1], sees.shape[2]
    groups = all_heads // heads
    span = triton.cdiv(max(span, 1), SPAN_STEP) * SPAN_STEP
    keys_seen = min(span, window) if window else span
    many = rows > MANY
    tiles = tiles or attention_tiles(groups * rows, keys_seen, batch * heads, width, query.element_size(), many)
    out = torch.empty(batch, rows, all_heads, width, dtype=query.dtype, device=query.device)
    joined = tiles.splits > 1
    parts = torch.empty(tiles.splits, *out.shape, dtype=torch.float32, device=query.device) if joined else out.unsqueeze(0)
    shape = (2, *parts.shape[:-1]) if joined else (2, 0)
    peaks, totals = torch.empty(shape, dtype=torch.float32, device=query.device)
    placed = slots if depth is None else depth
    early = overlaps(query.device)
    inner, factor = (2 * LOG2E * scaling / softcap, LOG2E * softcap) if softcap else (0.0, LOG2E * scaling)
    _attend[(batch * heads, triton.cdiv(groups * rows, tiles.block_q), tiles.splits)](
        query, keys, values, slots, base, sees.view(torch.uint8), placed, parts, peaks, totals, inner, factor,
        *query.stride()[:3], *keys.stride()[:3], _per_seq(sees), *sees.stride()[1:], _per_seq(placed), *parts.stride()[:4],
        rows, scratch, keys.shape[2], heads, groups * rows, tiles.splits, tiles.least,
        WIDTH=width, GROUPS=groups, BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, SHARES=tiles.shares, CHAIN=chain,
        CAUSAL=causal, WINDOW=window, CAPPED=softcap > 0, JOINED=joined, EARLY=early,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, **early_launch(early),
    )  # fmt: skip
    if joined:
        answers, power = batch * rows * all_heads, triton.next_power_of_2(tiles.splits)
        _join[(answers,)](
            parts, peaks, totals, base, out, answers, tiles.splits, tiles.least, rows * all_heads,
            WIDTH=width, SPLITS=power, BLOCK_K=tiles.block_k, WINDOW=window, EARLY=early,
            num_warps=1 if power * width <= 2048 else 4, **early_launch(early),
        )  # fmt: skip
    return out


def _per_seq(tensor: Tensor) -> int:
    """The stride from one sequence to the next; 0 where all share one."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 0
