"""Tree attention as a Triton kernel for CUDA: programs split the keys of a sequence among them.

Torch's masked attention builds a mask over every key and reads it in every layer. Here a program takes one key head of one
sequence, a block of the queries that share it, and a share of the keys. It reads `sees` only where its share reaches the
scratch rows, and not even there for a chain, such as a prompt. It stops at the sequence's own length, and at the last row
that its queries can see. If there are several shares, a second kernel joins them.
The torch reference is `attend` in model/attention.py; tests compare the two, on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import early_launch, overlaps, take_turn
from foreword.ops.layer.preload import sum_shares

PROGRAMS = 132  # programs that keep a large GPU busy: one per multiprocessor
MANY_UNITS = 24  # units (sequences x key heads) beyond which the least share grows with their number
MANY_ROWS = 128  # more rows than this are a prompt; they fill the GPU unless the prefix is long
LEAST_SHARE, LEAST_SHARE_OF_MANY_ROWS = 64, 512  # keys per share, at least
UNSPLIT = 2048  # keys that one program reads alone if the units fill the GPU: joining would cost more than it saves
MOST_SHARES = 15  # of the prefix; more would cost more to join than they save
SPAN_STEP = 256  # the split changes only when a sequence grows by this many tokens
LOG2E = math.log2(math.e)  # the hardware computes powers of 2
PER_NAT = tl.constexpr(LOG2E)  # the same in kernels
LOWEST = tl.constexpr(-1e30)  # below every score, and finite: the difference of two infinities is NaN


@dataclass(frozen=True)
class AttentionTiles:
    """How work is split: queries and keys that a program takes at a time, its warps, loads in flight, shares of all keys.

    Of several `splits`, the last is for the scratch rows and the others for the prefix. `least`: the fewest keys in a share
    of the prefix, so that short sequences have fewer shares. `shares`: how many warps share the keys of one step."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    splits: int
    shares: int = 1
    least: int = 0

    def __post_init__(self) -> None:
        assert self.least % self.block_k == 0, "shares are whole blocks: keys past the end of a share would not be masked"


def attention_tiles(queries: int, keys: int, units: int, width: int, item: int = 2, many: bool = False) -> AttentionTiles:
    """Return tiles for `queries` that share a key head and up to `keys` keys, in `units` (sequences x key heads), with
    `item` bytes per number. `many`: the rows are a prompt's.

    The split of the keys must not depend on the queries of a tree: see `_prefix_share`. `shares` changes only the order of
    sums.
    """
    block_k, busy = 64 if width * item <= 256 else 32, units >= PROGRAMS
    least = max(LEAST_SHARE * units // MANY_UNITS, UNSPLIT if busy else LEAST_SHARE_OF_MANY_ROWS if many else LEAST_SHARE)
    least = triton.cdiv(least, block_k) * block_k
    shares = min(triton.cdiv(keys, least), MOST_SHARES)
    splits = shares + 1 if shares > 1 else 1
    if busy:
        block_q = 16 if queries <= 16 else 64  # 32 is too few for the larger matrix instruction
    else:
        narrow = units * splits * triton.cdiv(queries, 16) <= 4 * PROGRAMS  # otherwise keys would be read too often
        block_q = 16 if narrow else min(max(16, triton.next_power_of_2(queries)), 64)
    if width * item > 256:
        return AttentionTiles(block_q, block_k, 8, 2, splits, least=least)
    stages, sharing = 2 if block_q == 16 else 3, 4 if block_q == 16 and item == 2 else 1
    return AttentionTiles(block_q, block_k, 4, stages, splits, sharing, least)


@triton.jit
def _key_indices(BLOCK_K: tl.constexpr, SHARES: tl.constexpr):
    """Return the indices of the keys of a block: [BLOCK_K], or [SHARES, keys per warp]."""
    if SHARES == 1:
        return tl.arange(0, BLOCK_K)
    else:
        per_warp: tl.constexpr = BLOCK_K // SHARES
        return tl.arange(0, SHARES)[:, None] * per_warp + tl.arange(0, per_warp)[None, :]


@triton.jit
def _empty_softmax(BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """Return a softmax over no keys: the best score, the sum of weights, and the weighted sum of values."""
    best = tl.full([BLOCK_Q], LOWEST, tl.float32)
    if SHARES == 1:
        return best, tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    else:
        return best, tl.zeros([SHARES, BLOCK_Q], tl.float32), tl.zeros([SHARES, BLOCK_Q, WIDTH], tl.float32)


@triton.jit
def _add_block(
    best, total, acc, q, k, v, visible, inner, factor,
    SHARES: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the running softmax: the best score so far, the sum of weights, the weighted sum of values.

    If warps share the keys, each has its own sums. The best score is over all of them, so that weights are rounded as they
    are without sharing."""
    last: tl.constexpr = 1 if SHARES == 1 else 2
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        score = 1.0 - 2.0 / (1.0 + tl.exp2(score * inner))  # tanh
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    highest = tl.max(score, last)
    if SHARES > 1:
        highest = tl.max(highest, 0)
    peak = tl.maximum(best, highest * factor)
    rescale = tl.exp2(best - peak)
    weight = tl.exp2(score * factor - peak[:, None])
    total = total * rescale + tl.sum(weight, last)
    acc = acc * rescale[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return peak, total, acc


@triton.jit
def _sum_over_warps(total, acc, BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """Add the sums of the warps that share the keys."""
    if SHARES > 1:
        total = tl.reshape(sum_shares(tl.expand_dims(total, 2), BLOCK_Q, 1, SHARES), (BLOCK_Q,))
        acc = sum_shares(acc, BLOCK_Q, WIDTH, SHARES)
    return total, acc


@triton.jit
def _add_sink(best, total, acc, sink_at, real, SINKS: tl.constexpr):
    """Add a key without a value to the softmax of each real row, if there are sinks. Of several shares, one has it."""
    if SINKS:
        sink = tl.load(sink_at, mask=real, other=LOWEST).to(tl.float32) * PER_NAT
        peak = tl.maximum(best, sink)
        rescale = tl.exp2(best - peak)
        best, total, acc = peak, total * rescale + tl.exp2(sink - peak), acc * rescale[:, None]
    return best, total, acc


@triton.jit
def _visible(
    sees, real, row, scratch_row, window_start, first, scratch, s_row, s_column, CHAIN: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Return which keys of a block each query sees, where the block reaches the scratch. `scratch_row` [.., 1, keys]: index
    of each key, counted from the first scratch row. `first`: the scratch row of the pass's first row."""
    seen = scratch_row <= tl.minimum(first + row, scratch - 1)[:, None] if CHAIN else scratch_row < 0
    if WINDOW > 0:
        seen = seen & (scratch_row >= window_start[:, None])
    if not CHAIN:
        in_tree = real[:, None] & (scratch_row >= 0) & (scratch_row < scratch)
        seen = seen | (tl.load(sees + row[:, None] * s_row + scratch_row * s_column, mask=in_tree, other=0) != 0)
    return seen


@triton.jit
def _later_blocks(
    best, total, acc, q, key_at, value_at, tile, c_row, sees, s_row, s_column, real, row, window_start, block,
    begin, seen_by_all, stop, length, first_row, inner, factor,
    BLOCK_K: tl.constexpr, SHARES: tl.constexpr, CHAIN: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a share's other blocks: first those that all queries see, except for a window, then those that only some see."""
    last: tl.constexpr = 1 if SHARES == 1 else 2
    unmasked = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_K * BLOCK_K
    scratch_row = tl.expand_dims(block, last - 1) - length
    for start in range(begin, unmasked, BLOCK_K):
        k = tl.load(key_at + start * c_row + tile)
        v = tl.load(value_at + start * c_row + tile)
        visible = start + scratch_row >= window_start[:, None]
        best, total, acc = _add_block(
            best, total, acc, q, k, v, visible, inner, factor, SHARES, WINDOW > 0, CAPPED, PRECISION
        )  # fmt: skip
    for start in range(unmasked, stop, BLOCK_K):
        inside = tl.expand_dims(start + block < stop, last)
        k = tl.load(key_at + start * c_row + tile, mask=inside, other=0.0)
        v = tl.load(value_at + start * c_row + tile, mask=inside, other=0.0)
        visible = _visible(
            sees, real, row, start + scratch_row, window_start, first_row, stop - length, s_row, s_column, CHAIN, WINDOW
        )
        best, total, acc = _add_block(best, total, acc, q, k, v, visible, inner, factor, SHARES, True, CAPPED, PRECISION)
    return best, total, acc


@triton.jit
def _prefix_share(length, splits, least, BLOCK_K: tl.constexpr, WINDOW: tl.constexpr):
    """Return where the visible prefix begins, and the keys per share of it. The split is the same for any number of rows, so
    that a row is rounded alike alone and among others. The last of several shares has no prefix: it is for the scratch."""
    origin = tl.maximum(length - WINDOW + 1, 0) if WINDOW > 0 else 0  # the window of a deeper row begins later
    return origin, tl.maximum(least, tl.cdiv(tl.cdiv(length - origin, tl.maximum(splits - 1, 1)), BLOCK_K) * BLOCK_K)


@triton.jit
def _scratch_ends(begin, length, rows, scratch, cached, BLOCK_Q: tl.constexpr, CHAIN: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the end of the keys that any query of a block sees, and the end of those that all see. In a causal pass no row
    sees a later one; in a chain each row sees all earlier ones. Padding may lie beyond the cache."""
    lowest, first_row = begin % rows, scratch - rows
    stop = tl.minimum(length + scratch, cached)
    if CAUSAL:
        stop = tl.minimum(length + first_row + tl.minimum(lowest + BLOCK_Q, rows), cached)
    seen_by_all = length
    if CHAIN:
        lowest = tl.where(lowest + BLOCK_Q > rows, 0, lowest)  # the block continues with the first row of another head
        seen_by_all = tl.minimum(length + first_row + lowest + 1, stop)
    return stop, seen_by_all


@triton.jit
def _store(out, peaks, totals, place, best, total, acc, real, WIDTH: tl.constexpr, JOINED: tl.constexpr):
    """Store a softmax: divided by its sum of weights, or undivided with its best score and that sum if shares are joined."""
    if JOINED:
        tl.store(peaks + place // WIDTH, best, mask=real)
        tl.store(totals + place // WIDTH, total, mask=real)
    else:
        acc /= tl.maximum(total, 1e-37)[:, None]  # no division by zero for a row that sees nothing
    tl.store(out + place[:, None] + tl.arange(0, WIDTH)[None, :], acc, mask=real[:, None])


VARIES = ["s_batch", "s_row", "d_batch", "o_split", "rows", "scratch", "cached", "heads", "queries", "splits", "least"]


@triton.jit(do_not_specialize=VARIES)
def _attend(
    query, keys, values, slots, base, sees, depth, sinks, out, peaks, totals, inner, factor,
    q_batch, q_head, q_row, c_slot, c_head, c_row, s_batch, s_row, s_column, d_batch, o_split, o_batch, o_row, o_head,
    rows, scratch, cached, heads, queries, splits, least,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SHARES: tl.constexpr,
    CHAIN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, JOINED: tl.constexpr,
    SINKS: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one block of queries over one share of the keys."""
    head, split = tl.program_id(0) % heads, tl.program_id(2)
    seq = (tl.program_id(0) // heads).to(tl.int64)
    slot = tl.load(slots + seq)
    length = tl.load(base + seq).to(tl.int32)
    index = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    group, row, real = index // rows, index % rows, index < queries
    column, block = tl.arange(0, WIDTH), _key_indices(BLOCK_K, SHARES)
    last: tl.constexpr = 1 if SHARES == 1 else 2  # the axis of a key's numbers, after that of keys

    origin, share = _prefix_share(length, splits, least, BLOCK_K, WINDOW)
    first = tl.minimum(origin + split * share, length)
    prefix_stop = tl.minimum(first + share, length)
    if (first == length) & (split < splits - 1):
        return  # the sequence is too short for this share; `_join` skips it
    window_start = row
    if WINDOW > 0:
        window_start = tl.load(depth + seq * d_batch + row) - (WINDOW - 1)
    stop, seen_by_all, first_row = prefix_stop, prefix_stop, scratch - rows
    if split == splits - 1:
        stop, seen_by_all = _scratch_ends(tl.program_id(1) * BLOCK_Q, length, rows, scratch, cached, BLOCK_Q, CHAIN, CAUSAL)

    # The first block: `sees`, and keys older than the previous kernel, are loaded before the wait.
    tile = tl.expand_dims(block, last) * c_row + column
    key_at, value_at = keys + slot * c_slot + head * c_head, values + slot * c_slot + head * c_head
    key_index = tl.expand_dims(first + block, last)
    is_old, is_new = key_index < prefix_stop, (key_index >= length) & (key_index < stop)
    key = tl.load(key_at + first * c_row + tile, mask=is_old, other=0.0)
    value = tl.load(value_at + first * c_row + tile, mask=is_old, other=0.0)
    sees += seq * s_batch
    scratch_row = tl.expand_dims(first + block, last - 1) - length
    seen = _visible(sees, real, row, scratch_row, window_start, first_row, stop - length, s_row, s_column, CHAIN, WINDOW)
    take_turn(EARLY)
    new_key = tl.load(key_at + first * c_row + tile, mask=is_new, other=0.0)
    new_value = tl.load(value_at + first * c_row + tile, mask=is_new, other=0.0)
    q_at = (head * GROUPS + group) * q_head + row * q_row
    q = tl.load(query + seq * q_batch + q_at[:, None] + column[None, :], mask=real[:, None], other=0.0)
    key, value = tl.where(is_new, new_key, key), tl.where(is_new, new_value, value)
    if SHARES > 1:
        q = tl.broadcast_to(q[None, :, :], (SHARES, BLOCK_Q, WIDTH))
    best, total, acc = _empty_softmax(BLOCK_Q, WIDTH, SHARES)
    best, total, acc = _add_block(best, total, acc, q, key, value, seen, inner, factor, SHARES, True, CAPPED, PRECISION)
    if first + BLOCK_K < stop:
        best, total, acc = _later_blocks(
            best, total, acc, q, key_at, value_at, tile, c_row, sees, s_row, s_column, real, row, window_start, block,
            first + BLOCK_K, seen_by_all, stop, length, first_row, inner, factor,
            BLOCK_K, SHARES, CHAIN, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
    total, acc = _sum_over_warps(total, acc, BLOCK_Q, WIDTH, SHARES)
    best, total, acc = _add_sink(best, total, acc, sinks + head * GROUPS + group, real & (split == splits - 1), SINKS)
    place = split.to(tl.int64) * o_split + seq * o_batch + row * o_row + (head * GROUPS + group) * o_head
    _store(out, peaks, totals, place, best, total, acc, real, WIDTH, JOINED)


@triton.jit(do_not_specialize=["outputs", "splits", "least", "per_sequence"])
def _join(
    parts, peaks, totals, base, out, outputs, splits, least, per_sequence,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the shares of one output row, weighted by their part of the softmax. A sequence has `per_sequence` rows."""
    output = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    length = tl.load(base + output // per_sequence).to(tl.int32)
    origin, share = _prefix_share(length, splits, least, BLOCK_K, WINDOW)
    inside = ((split < splits - 1) & (origin + split * share < length)) | (split == splits - 1)
    place = split * outputs + output
    take_turn(EARLY)
    pieces = tl.load(parts + place[:, None] * WIDTH + column[None, :], mask=inside[:, None], other=0.0)
    peak = tl.load(peaks + place, mask=inside, other=LOWEST)
    weight = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(totals + place, mask=inside, other=0.0) * weight, 0)
    tl.store(out + output * WIDTH + column, tl.sum(pieces * weight[:, None], 0) / tl.maximum(total, 1e-37))


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
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from query [b, heads, n, width] to the cache's keys, values [B, key heads, rows, width]: [b, n, heads, width].

    base [b]: each slot's committed rows, at most `span`. sees [b or 1, n, m]: which of the m scratch rows after them each
    row sees; the last n of these are the pass. causal: no row sees a later one, whatever `sees` says; pass False for a block
    whose rows see each other. chain: every row sees all earlier ones. window: a row sees the last `window` positions only,
    its own included; then `depth` [b or 1, n] is each row's depth after `base`, and `sees` must already exclude scratch rows
    outside the window. softcap: a bound on the scores. sinks [heads]: the score of a key without a value, for each head.
    All but the queries and the scratch rows must be older than the previous kernel: see ops/layer/overlap.py.
    """
    assert causal or not chain, "a chain is causal"
    batch, all_heads, rows, width = query.shape
    heads, scratch = keys.shape[1], sees.shape[2]
    groups = all_heads // heads
    span = triton.cdiv(max(span, 1), SPAN_STEP) * SPAN_STEP
    keys_seen = min(span, window) if window else span
    many = rows > MANY_ROWS
    tiles = tiles or attention_tiles(groups * rows, keys_seen, batch * heads, width, query.element_size(), many)
    out = torch.empty(batch, rows, all_heads, width, dtype=query.dtype, device=query.device)
    joined = tiles.splits > 1
    parts = torch.empty(tiles.splits, *out.shape, dtype=torch.float32, device=query.device) if joined else out.unsqueeze(0)
    shape = (2, *parts.shape[:-1]) if joined else (2, 0)
    peaks, totals = torch.empty(shape, dtype=torch.float32, device=query.device)
    row_depth, sink = slots if depth is None else depth, slots if sinks is None else sinks.contiguous()
    early = overlaps(query.device)
    inner, factor = (2 * LOG2E * scaling / softcap, LOG2E * softcap) if softcap else (0.0, LOG2E * scaling)
    _attend[(batch * heads, triton.cdiv(groups * rows, tiles.block_q), tiles.splits)](
        query, keys, values, slots, base, sees.view(torch.uint8), row_depth, sink, parts, peaks, totals, inner, factor,
        *query.stride()[:3], *keys.stride()[:3], _per_seq(sees), *sees.stride()[1:], _per_seq(row_depth),
        *parts.stride()[:4], rows, scratch, keys.shape[2], heads, groups * rows, tiles.splits, tiles.least,
        WIDTH=width, GROUPS=groups, BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, SHARES=tiles.shares, CHAIN=chain,
        CAUSAL=causal, WINDOW=window, CAPPED=softcap > 0, SINKS=sinks is not None, JOINED=joined, EARLY=early,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, **early_launch(early),
    )  # fmt: skip
    if joined:
        outputs, power = batch * rows * all_heads, triton.next_power_of_2(tiles.splits)
        _join[(outputs,)](
            parts, peaks, totals, base, out, outputs, tiles.splits, tiles.least, rows * all_heads,
            WIDTH=width, SPLITS=power, BLOCK_K=tiles.block_k, WINDOW=window, EARLY=early,
            num_warps=1 if power * width <= 2048 else 4, **early_launch(early),
        )  # fmt: skip
    return out


def _per_seq(tensor: Tensor) -> int:
    """Return the stride from one sequence to the next; 0 if all share one entry."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 0
