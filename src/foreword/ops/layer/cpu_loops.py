"""The steps between a layer's products on the CPU: norms, rotary embeddings and gates, each a loop compiled by Numba.

As torch operations these are thirty calls per layer, and each waits for its own code, since a product has just evicted the
caches. Here they are five calls. Inputs are float32 arrays that share memory with tensors. No loop may drop a NaN: a broken
model has to show. The loops are compiled once per machine, then read from disk.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float32, njit

from foreword.ops.layer.compiled import loop


@njit(inline="always", error_model="numpy")
def _exp(x):
    """e^x = 2^whole * e^fraction, the latter by a polynomial: within 4e-7, and the compiler can vectorise it 16 wide."""
    x = float32(-87.0) if x < float32(-87.0) else x
    x = float32(88.0) if x > float32(88.0) else x
    whole = np.floor(x * float32(1.44269504) + float32(0.5))
    fraction = x - whole * float32(0.693359375) - whole * float32(-2.12194440e-4)  # ln 2 as a sum of two, the first exact
    value = float32(1.98756915e-4)
    value = value * fraction + float32(1.39819995e-3)
    value = value * fraction + float32(8.33345191e-3)
    value = value * fraction + float32(4.16657959e-2)
    value = value * fraction + float32(1.66666655e-1)
    value = value * fraction + float32(5.00000012e-1)
    value = value * fraction * fraction + fraction + float32(1.0)
    return value * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@loop("void(float32[:, ::1], float32[::1], float32, float32[:, ::1])")
def normed(rows, weight, epsilon, out):
    """out = RMSNorm(rows)."""
    for r in range(rows.shape[0]):
        total = float32(0)
        for i in range(rows.shape[1]):
            total += rows[r, i] * rows[r, i]
        scale = float32(1) / math.sqrt(total / float32(rows.shape[1]) + epsilon)
        for i in range(rows.shape[1]):
            out[r, i] = rows[r, i] * scale * weight[i]


@loop("void(float32[:, ::1], float32[:, ::1], float32[::1], float32, float32[:, ::1])")
def added_and_normed(rows, residual, weight, epsilon, out):
    """rows += more; out = RMSNorm(rows)."""
    for r in range(rows.shape[0]):
        total = float32(0)
        for i in range(rows.shape[1]):
            value = rows[r, i] + residual[r, i]
            rows[r, i] = value
            total += value * value
        scale = float32(1) / math.sqrt(total / float32(rows.shape[1]) + epsilon)
        for i in range(rows.shape[1]):
            out[r, i] = rows[r, i] * scale * weight[i]


@njit(inline="always", error_model="numpy")
def _rotate(head, cosine, sine, weight, epsilon, out):
    """Rotate one head of a row, after its norm if `weight` is not empty."""
    half = head.shape[0] // 2
    if weight.shape[0]:
        total = float32(0)
        for i in range(2 * half):
            total += head[i] * head[i]
        scale = float32(1) / math.sqrt(total / float32(2 * half) + epsilon)
        for i in range(2 * half):
            head[i] = head[i] * scale * weight[i]
    for i in range(half):
        low, high = head[i], head[half + i]
        out[i] = low * cosine[i] - high * sine[i]
        out[half + i] = high * cosine[half + i] + low * sine[half + i]


@loop(
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[::1], float32[::1], float32, int64[::1],"
    " float32[:, ::1], float32[:, ::1], float32[:, :, :, ::1])",
)
def rotated_and_stored(qkv, cosine, sine, q_norm, k_norm, epsilon, places, keys, values, query):
    """From rows of (q, k, v), write rotated q to `query` [b, key heads, groups * n, width], rotated k and v to the cache.

    `keys` and `values` are a layer's cache with (slot, head, row) as one axis; `places` has the entries of (b, key head, n).
    """
    batch, heads, grouped, width = query.shape
    count = qkv.shape[0] // batch
    groups = grouped // count
    first_key, first_value = heads * groups * width, heads * (groups + 1) * width
    for r in range(qkv.shape[0]):
        seq, row = r // count, r % count
        for head in range(heads):
            for group in range(groups):
                start = (head * groups + group) * width
                _rotate(
                    qkv[r, start : start + width], cosine[r], sine[r], q_norm, epsilon, query[seq, head, group * count + row]
                )
            place = places[(seq * heads + head) * count + row]
            start = first_key + head * width
            _rotate(qkv[r, start : start + width], cosine[r], sine[r], k_norm, epsilon, keys[place])
            for i in range(width):
                values[place, i] = qkv[r, first_value + head * width + i]


@loop("void(float32[:, ::1], float32[:, ::1])")
def gated(both, out):
    """out = silu(gate) * up, where a row of `both` is (gate, up)."""
    width = out.shape[1]
    for r in range(out.shape[0]):
        for i in range(width):
            gate = both[r, i]
            out[r, i] = gate / (float32(1) + _exp(-gate)) * both[r, width + i]


@loop("void(float32[:, ::1], float32[:, ::1])")
def added(rows, residual):
    """rows += more."""
    for r in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            rows[r, i] += residual[r, i]
