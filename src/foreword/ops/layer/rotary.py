"""Everything between the q/k/v product and attention, in one kernel: norms on q and k, rotary embeddings, cache stores.

In: the product's rows, cosines and sines of their positions, and their places in the cache. Out: rotated queries; rotated
keys and values are stored in the cache. A program takes a few heads of one row. For few rows without norms on q and k,
qkv.py does the same inside the product's kernel, with the functions defined here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import early_launch, overlaps, take_turn

# A large model has thousands of heads in a few rows. One program per head would take longer to start than to run.
HEADS_AT_ONCE = 16


@triton.jit
def _rotate_and_store(
    qkv, cosine, sine, keys, values, places, q_norm, k_norm, out, rows, q_epsilon, k_epsilon,
    c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, Q_NORMED: tl.constexpr, K_NORMED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate and store some heads of one row. A head has halves `low` and `high`: low cos - high sin, high cos + low sin."""
    take_turn(EARLY)
    flat_row = tl.program_id(0)
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    seq, row = flat_row // rows, flat_row % rows
    place = cache_place(places, seq, row, head, rows, KEY_HEADS)
    index = tl.arange(0, BLOCK)[None, :]
    inside = (index < HALF) & (head < HEADS + 2 * KEY_HEADS)
    source = qkv + (flat_row.to(tl.int64) * (HEADS + 2 * KEY_HEADS) + head) * (2 * HALF) + index
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KEY_HEADS)
    if Q_NORMED:
        low, high = _normed(low, high, is_query, q_norm, q_epsilon, index, HALF)
    if K_NORMED:
        low, high = _normed(low, high, is_key, k_norm, k_epsilon, index, HALF)
    angle = angles(cosine, sine, seq * c_batch + row * c_row, seq * s_batch + row * s_row, index, index < HALF, HALF)
    rotated_low, rotated_high = rotated(low, high, angle)
    low, high = tl.where(is_query | is_key, rotated_low, low), tl.where(is_query | is_key, rotated_high, high)
    _store_halves(out, flat_row.to(tl.int64) * HEADS + head, low, high, index, inside & is_query, HALF)
    _store_halves(keys, place, low, high, index, inside & is_key, HALF)
    _store_halves(values, place, low, high, index, inside & (head >= HEADS + KEY_HEADS), HALF)


@triton.jit
def _normed(low, high, chosen, weight, epsilon, index, HALF: tl.constexpr):
    """Apply the norm to the `chosen` heads; return the others unchanged."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1))[:, None] / (2 * HALF) + epsilon)
    weights = weight + tl.minimum(index, HALF - 1)
    low = tl.where(chosen, low * scale * tl.load(weights).to(tl.float32), low)
    return low, tl.where(chosen, high * scale * tl.load(weights + HALF).to(tl.float32), high)


@triton.jit
def cache_place(places, seq, row, head, rows, KEY_HEADS: tl.constexpr):
    """Return the place of a row's head in the cache. The number of heads is a multiple of the key heads.

    Queries have no place. It is loaded for them too, since a check first would make keys and values wait.
    """
    return tl.load(places + (seq * KEY_HEADS + head % KEY_HEADS) * rows + row)


@triton.jit
def angles(cosine, sine, c_at, s_at, index, inside, HALF: tl.constexpr):
    """Load cosines and sines of the low half of a head, then those of the high half."""
    cos, sin = cosine + c_at + index, sine + s_at + index
    cos_low, sin_low = tl.load(cos, mask=inside, other=0.0), tl.load(sin, mask=inside, other=0.0)
    cos_high, sin_high = tl.load(cos + HALF, mask=inside, other=0.0), tl.load(sin + HALF, mask=inside, other=0.0)
    return cos_low, sin_low, cos_high, sin_high


@triton.jit
def rotated(low, high, angle):
    """Rotate the halves of a head, in float32."""
    cos_low, sin_low, cos_high, sin_high = angle
    rotated_low = low * cos_low.to(tl.float32) - high * sin_low.to(tl.float32)
    return rotated_low, high * cos_high.to(tl.float32) + low * sin_high.to(tl.float32)


@triton.jit
def store_head(
    out, keys, values, flat_row, place, head, low, high, index, inside,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Store a head of row `flat_row` with the queries, or at its place in the cache."""
    if head < HEADS:
        _store_halves(out, flat_row.to(tl.int64) * HEADS + head, low, high, index, inside, HALF)
    elif head < HEADS + KEY_HEADS:
        _store_halves(keys, place, low, high, index, inside, HALF)
    else:
        _store_halves(values, place, low, high, index, inside, HALF)


@triton.jit
def _store_halves(destination, place, low, high, index, inside, HALF: tl.constexpr) -> None:
    destination += place * (2 * HALF) + index
    tl.store(destination, low.to(destination.dtype.element_ty), mask=inside)
    tl.store(destination + HALF, high.to(destination.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    q_norm: tuple[Tensor, float] | None = None,
    k_norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Return queries [b, heads, n, width] of qkv [b, n, (heads + 2 key heads) * width]; store keys and values in the cache.

    cosine, sine [b or 1, n, width]; keys, values [B, key heads, rows, width]: the cache; places [b * key heads * n]: from
    `SlotCache.places`; q_norm, k_norm: the weight [width] and epsilon of an RMSNorm per head.
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
    _rotate_and_store[(batch * rows, triton.cdiv(heads + 2 * key_heads, at_once))](
        qkv.contiguous(), cosine, sine, keys, values, places, q_weight, k_weight, out, rows, q_epsilon, k_epsilon,
        *cosine.stride()[:2], *sine.stride()[:2],
        HEADS=heads, KEY_HEADS=key_heads, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2),
        AT_ONCE=at_once, Q_NORMED=q_norm is not None, K_NORMED=k_norm is not None,
        EARLY=early, num_warps=2, **early_launch(early),
    )  # fmt: skip
    return out.transpose(1, 2)
