"""Between the q/k/v product and attention, in one kernel: norms on q and k, rotary positions, rows into the cache.

In: the product's rows as they came out, cosines and sines of their positions, and their places in the cache. Out: the
queries, turned; keys, turned, and values are in the cache. A program takes a few heads of one row. Few rows whose heads have
no norms need no such kernel: qkv.py does the same behind the product, with the pieces that are here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import early_launch, overlaps, take_turn

# A large model has thousands of heads in a few rows, and as many programs take longer to start than to run.
HEADS_AT_ONCE = 16


@triton.jit
def _turn(
    qkv, cosine, sine, keys, values, places, q_norm, k_norm, out, rows, q_epsilon, k_epsilon,
    c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, Q_NORMED: tl.constexpr, K_NORMED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Halves of a head are `low` and `high`: low cos - high sin, high cos + low sin."""
    take_turn(EARLY)
    line = tl.program_id(0)
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    seq, row = line // rows, line % rows
    place = place_of(places, seq, row, head, rows, KEY_HEADS)
    at = tl.arange(0, BLOCK)[None, :]
    here = (at < HALF) & (head < HEADS + 2 * KEY_HEADS)
    source = qkv + (line.to(tl.int64) * (HEADS + 2 * KEY_HEADS) + head) * (2 * HALF) + at
    low = tl.load(source, mask=here, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=here, other=0.0).to(tl.float32)
    asks, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KEY_HEADS)
    if Q_NORMED:
        low, high = _normed(low, high, asks, q_norm, q_epsilon, at, HALF)
    if K_NORMED:
        low, high = _normed(low, high, is_key, k_norm, k_epsilon, at, HALF)
    angle = angles(cosine, sine, seq * c_batch + row * c_row, seq * s_batch + row * s_row, at, at < HALF, HALF)
    turned_low, turned_high = turned(low, high, angle)
    low, high = tl.where(asks | is_key, turned_low, low), tl.where(asks | is_key, turned_high, high)
    _put(out, line.to(tl.int64) * HEADS + head, low, high, at, here & asks, HALF)
    _put(keys, place, low, high, at, here & is_key, HALF)
    _put(values, place, low, high, at, here & (head >= HEADS + KEY_HEADS), HALF)


@triton.jit
def _normed(low, high, those, weight, epsilon, at, HALF: tl.constexpr):
    """`those` of the heads after their norm, and the others as they are."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1))[:, None] / (2 * HALF) + epsilon)
    weights = weight + tl.minimum(at, HALF - 1)
    low = tl.where(those, low * scale * tl.load(weights).to(tl.float32), low)
    return low, tl.where(those, high * scale * tl.load(weights + HALF).to(tl.float32), high)


@triton.jit
def place_of(places, seq, row, head, rows, KEY_HEADS: tl.constexpr):
    """Where a head of a row lies in the cache. Heads are a multiple of key heads.

    Queries have no place, but whoever asks only once it knows would make keys and values wait.
    """
    return tl.load(places + (seq * KEY_HEADS + head % KEY_HEADS) * rows + row)


@triton.jit
def angles(cosine, sine, c_at, s_at, at, here, HALF: tl.constexpr):
    """Cosines and sines of the low half of a head, then those of the high half."""
    cos, sin = cosine + c_at + at, sine + s_at + at
    cos_low, sin_low = tl.load(cos, mask=here, other=0.0), tl.load(sin, mask=here, other=0.0)
    cos_high, sin_high = tl.load(cos + HALF, mask=here, other=0.0), tl.load(sin + HALF, mask=here, other=0.0)
    return cos_low, sin_low, cos_high, sin_high


@triton.jit
def turned(low, high, angle):
    """Halves of a head, in float32."""
    cos_low, sin_low, cos_high, sin_high = angle
    turned_low = low * cos_low.to(tl.float32) - high * sin_low.to(tl.float32)
    return turned_low, high * cos_high.to(tl.float32) + low * sin_high.to(tl.float32)


@triton.jit
def put(
    out, keys, values, line, place, head, low, high, at, here,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr,
) -> None:  # fmt: skip
    """A head of row `line` to the queries, or to its place in the cache."""
    if head < HEADS:
        _put(out, line.to(tl.int64) * HEADS + head, low, high, at, here, HALF)
    elif head < HEADS + KEY_HEADS:
        _put(keys, place, low, high, at, here, HALF)
    else:
        _put(values, place, low, high, at, here, HALF)


@triton.jit
def _put(goal, place, low, high, at, here, HALF: tl.constexpr) -> None:
    goal += place * (2 * HALF) + at
    tl.store(goal, low.to(goal.dtype.element_ty), mask=here)
    tl.store(goal + HALF, high.to(goal.dtype.element_ty), mask=here)


def turn_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    q_norm: tuple[Tensor, float] | None = None,
    k_norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """qkv [b, n, (heads + 2 key heads) * width] to queries [b, heads, n, width], and keys and values to the cache.

    `cosine` and `sine` are [b or 1, n, width]; the cache's `keys` and `values` [B, key heads, rows, width]; `places`
    [b * key heads * n] those of `SlotCache.places`; a norm is the weight [width] and the epsilon of an RMSNorm per head.
    """
    batch, rows, size = qkv.shape
    key_heads, width = keys.shape[1], keys.shape[3]
    heads = size // width - 2 * key_heads
    assert keys.is_contiguous() and values.is_contiguous() and places.shape[0] == batch * key_heads * rows
    cosine, sine = cosine.expand(batch, rows, width), sine.expand(batch, rows, width)
    assert cosine.stride(2) == 1 and sine.stride(2) == 1
    out = torch.empty(batch, rows, heads, width, dtype=qkv.dtype, device=qkv.device)
    (q_weight, q_epsilon), (k_weight, k_epsilon) = q_norm or (out, 0.0), k_norm or (out, 0.0)
    early = overlaps(qkv.device)
    at_once = min(HEADS_AT_ONCE, triton.next_power_of_2(heads + 2 * key_heads))
    _turn[(batch * rows, triton.cdiv(heads + 2 * key_heads, at_once))](
        qkv.contiguous(), cosine, sine, keys, values, places, q_weight, k_weight, out, rows, q_epsilon, k_epsilon,
        *cosine.stride()[:2], *sine.stride()[:2],
        HEADS=heads, KEY_HEADS=key_heads, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2),
        AT_ONCE=at_once, Q_NORMED=q_norm is not None, K_NORMED=k_norm is not None,
        EARLY=early, num_warps=2, **early_launch(early),
    )  # fmt: skip
    return out.transpose(1, 2)
