"""The compiled loops equal torch's operations for any number of rows, and never hide a NaN."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from foreword.ops.layer import cpu_loops

EPSILON = 1e-3  # large enough to matter


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count * width))


@pytest.mark.parametrize("count", [1, 3, 17])
def test_norms(count: int) -> None:
    x, residual, weight = rows(count, 37), 3 * rows(count + 1, 37)[1:], rows(1, 37)[0]
    out = torch.empty_like(x)
    cpu_loops.normed(x.numpy(), weight.numpy(), EPSILON, out.numpy())
    torch.testing.assert_close(out, rms_norm(x, (37,), weight, EPSILON))
    total = x + residual
    cpu_loops.added_and_normed(x.numpy(), residual.numpy(), weight.numpy(), EPSILON, out.numpy())
    assert torch.equal(x, total)
    torch.testing.assert_close(out, rms_norm(total, (37,), weight, EPSILON))


@pytest.mark.parametrize("count", [1, 5])
def test_gate(count: int) -> None:
    both, out = 20 * rows(count, 90), torch.empty(count, 45)
    both[0, :4] = torch.tensor([120.0, -120.0, 0.0, 1e-6])
    cpu_loops.gated(both.numpy(), out.numpy())
    gate, up = both.double().chunk(2, dim=1)
    torch.testing.assert_close(out, (silu(gate) * up).float(), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_rows_stay_broken(bad: float) -> None:
    x = rows(2, 16)
    x[1, 3] = bad
    out, half, ones = torch.empty_like(x), torch.empty(2, 8), np.ones(16, np.float32)
    cpu_loops.normed(x.numpy(), ones, EPSILON, out.numpy())
    assert out[1, 3].isnan() and out[0].isfinite().all()
    cpu_loops.gated(x.numpy(), half.numpy())
    assert not half[1, 3].isfinite() and half[0].isfinite().all()


@pytest.mark.parametrize("normed", [False, True], ids=["plain heads", "normed heads"])
@pytest.mark.parametrize(("batch", "count"), [(1, 1), (2, 3)])
def test_rotated_and_stored(batch: int, count: int, normed: bool) -> None:
    heads, groups, width, places = 2, 3, 8, torch.randperm(40)[: batch * 2 * count]
    qkv, angle = rows(batch * count, (heads * groups + 2 * heads) * width), rows(batch * count, width // 2)
    cosine, sine = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    norms = [rows(1, width)[0], rows(2, width)[1]] if normed else [torch.empty(0), torch.empty(0)]
    keys, values, query = torch.zeros(40, width), torch.zeros(40, width), torch.empty(batch, heads, groups * count, width)

    split = qkv.clone().view(batch, count, -1, width).transpose(1, 2)  # [b, all heads, n, width]
    q, k, v = split.split([heads * groups, heads, heads], dim=1)
    if normed:
        q, k = rms_norm(q, (width,), norms[0], EPSILON), rms_norm(k, (width,), norms[1], EPSILON)
    angles = [tensor.view(batch, 1, count, width) for tensor in (cosine, sine)]
    swapped = [torch.cat([-tensor[..., width // 2 :], tensor[..., : width // 2]], dim=-1) for tensor in (q, k)]
    q, k = q * angles[0] + swapped[0] * angles[1], k * angles[0] + swapped[1] * angles[1]

    arrays = [tensor.numpy() for tensor in (qkv, cosine, sine, *norms)]
    cpu_loops.rotated_and_stored(*arrays, EPSILON, places.numpy(), keys.numpy(), values.numpy(), query.numpy())
    torch.testing.assert_close(query, q.reshape(query.shape))
    torch.testing.assert_close(keys[places], k.reshape(-1, width))
    assert torch.equal(values[places], v.reshape(-1, width))
    others = torch.ones(40, dtype=torch.bool).index_fill_(0, places, False)
    assert not keys[others].any() and not values[others].any()
