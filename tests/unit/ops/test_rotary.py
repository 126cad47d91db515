"""Rotary embeddings and cache stores in one kernel, against transformers' rotation and the cache's own `store`."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foreword.core.state import Batch
from foreword.model.cache import CacheShape, SlotCache

pytest.importorskip("triton")

from foreword.ops.layer.rotary import rotate_and_store

EPSILON = 1e-3


def cache_of(key_heads: int, width: int) -> SlotCache:
    return SlotCache(CacheShape(1, key_heads, width, torch.float32), slots=4, context=20, scratch=8, device="cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("normed", ["", "q", "k", "qk"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "slots", "rows"),
    [(9, 3, 64, [0], 1), (4, 2, 16, [2], 5), (4, 4, 80, [3, 0], 3), (3, 1, 32, [1, 3, 2], 2), (15, 5, 16, [1, 0], 2)],
)
def test_it_is_norm_rotation_and_store(
    heads: int, key_heads: int, width: int, slots: list[int], rows: int, normed: str
) -> None:
    """Also for more heads than a program takes, and for programs with heads of q, k and v."""
    batch = len(slots)
    qkv = random(batch, rows, (heads + 2 * key_heads) * width)
    cosine, sine = random(batch, rows, width), random(batch, rows, width).flip(0, 1, 2)
    norms = {name: (1 + random(width + seed)[:width], EPSILON) for seed, name in enumerate("qk") if name in normed}
    found, exact = cache_of(key_heads, width), cache_of(key_heads, width)
    first = torch.arange(batch).view(-1, 1) * 4
    places = found.places(Batch.of(slots, 20), first + torch.arange(rows))

    query = rotate_and_store(qkv, cosine, sine, found.keys[0], found.values[0], places, norms.get("q"), norms.get("k"))

    parts = qkv.view(batch, rows, -1, width).transpose(1, 2).split([heads, key_heads, key_heads], dim=1)
    q, k = (
        rms_norm(part, (width,), *norms[name]) if name in norms else part for name, part in zip("qk", parts[:2], strict=True)
    )
    q, k = apply_rotary_pos_emb(q, k, cosine, sine)
    exact.layers[0].store(places, k, parts[2])
    for one, other in ((query, q), (found.keys[0], exact.keys[0]), (found.values[0], exact.values[0])):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_positions_may_be_shared_by_the_batch() -> None:
    cosine, sine = random(1, 3, 16), random(1, 3, 16).flip(2)
    qkv, given = random(2, 3, 4 * 16), []
    for spread in (False, True):
        cache = cache_of(1, 16)
        places = cache.places(Batch.of([0, 1], 20), torch.arange(3).expand(2, 3))
        angles = (cosine.repeat(2, 1, 1), sine.repeat(2, 1, 1)) if spread else (cosine, sine)
        given.append((rotate_and_store(qkv, *angles, cache.keys[0], cache.values[0], places), cache.keys[0]))
    assert all(torch.equal(one, other) for one, other in zip(*given, strict=True))
