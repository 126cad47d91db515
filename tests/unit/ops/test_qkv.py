"""The q/k/v product that rotates and stores, against torch in float32 and against the two kernels that it replaces."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foreword.core.state import Batch
from foreword.model.cache import CacheShape, SlotCache
from foreword.model.layer_cache import KVRows

pytest.importorskip("triton")

from foreword.ops.layer import linear as kernel
from foreword.ops.layer.linear import Prescaled, few_rows_linear, linear_and_prescale
from foreword.ops.layer.qkv import linear_rotate_and_store
from foreword.ops.layer.rotary import rotate_and_store
from foreword.ops.layer.tiles import Tiles

ONE = Tiles(1, 16, 64, warps=4, stages=1)
FEW = Tiles(16, 8, 32, warps=4, stages=2)
SHARED = replace(FEW, splits=2)
PRELOADED = replace(FEW, stages=0)
ONE_PRELOADED = replace(ONE, stages=0)

K = 72


class Case:
    """Rows of a layer, its weights, and the cache that a pass finds."""

    def __init__(
        self,
        heads: int,
        key_heads: int,
        width: int,
        slots: list[int],
        rows: int,
        dtype: torch.dtype = torch.float32,
        spread: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(heads * width + rows)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        batch, columns = len(slots), (heads + 2 * key_heads) * width
        self.heads, self.rows = heads, random(batch, rows, K)
        self.prescaled: Prescaled | None = None
        self.weight, self.bias, self.norm = random(columns, K) * K**-0.5, random(columns), (1 + random(K) / 4, 1e-3)
        self.angles = [random(batch if spread else 1, rows, width) for _ in range(2)]
        shape = CacheShape(1, key_heads, width, dtype)
        self.cache = SlotCache(shape, slots=4, context=20, scratch=8, device="cpu")
        first = torch.arange(batch).view(-1, 1) * 4
        self.places = self.cache.places(Batch.of(slots, 20), first + torch.arange(rows))

    def found(self, tiles: Tiles | None, normed: bool = True, biased: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        keys, values = (torch.zeros_like(part) for part in (self.cache.keys[0], self.cache.values[0]))
        bias, norm = self.bias if biased else None, self.norm if normed else None
        destination = keys, values, self.places
        query = linear_rotate_and_store(
            self.rows, self.weight, bias, norm, *self.angles, *destination, prescaled=self.prescaled, tiles=tiles
        )  # fmt: skip
        return query, keys, values

    def separate(self, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
        """The same by a product kernel and a rotation kernel."""
        keys, values = (torch.zeros_like(part) for part in (self.cache.keys[0], self.cache.values[0]))
        qkv = few_rows_linear(self.rows, self.weight, self.bias, norm=self.norm, tiles=tiles)
        return rotate_and_store(qkv, *self.angles, keys, values, self.places), keys, values

    def exact(self, normed: bool, biased: bool) -> tuple[Tensor, Tensor, Tensor]:
        rows = rms_norm(self.rows, (K,), *self.norm) if normed else self.rows
        qkv = linear(rows, self.weight, self.bias if biased else None)
        keys, values = (torch.zeros_like(part) for part in (self.cache.keys[0], self.cache.values[0]))
        parts = qkv.view(*rows.shape[:2], -1, keys.shape[-1]).transpose(1, 2)
        q, k, v = parts.split([self.heads, keys.shape[1], keys.shape[1]], dim=1)
        q, k = apply_rotary_pos_emb(q, k, *(part.expand(len(rows), -1, -1) for part in self.angles))
        KVRows(keys, values).store(self.places, k, v)
        return q, keys, values


TILES = {"one": ONE, "few": FEW, "shared": SHARED, "default": None}
SHAPES: list[tuple[int, int, int, list[int], int]] = [
    (4, 2, 64, [0], 1),
    (2, 1, 16, [2], 5),
    (1, 1, 80, [3, 0], 2),
    (3, 1, 24, [1, 3, 2], 6),
]


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_it_is_product_rotation_and_store(shape: int, tiles: str) -> None:
    """Also for halves of a head that do not fill a whole number of programs, and for more rows than a program takes. All
    tiles and all shapes have cases with a norm and no bias, and cases with a bias and no norm."""
    normed = (shape + list(TILES).index(tiles)) % 2 == 0
    biased, case = not normed, Case(*SHAPES[shape])
    for found, exact in zip(case.found(TILES[tiles], normed, biased), case.exact(normed, biased), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tiles", [ONE, FEW, SHARED], ids=["one", "few", "shared"])
def test_positions_may_be_shared_by_the_batch(tiles: Tiles) -> None:
    case = Case(2, 1, 16, [0, 2], 3, spread=False)
    found = case.found(tiles)
    case.angles = [part.repeat(2, 1, 1) for part in case.angles]
    assert all(torch.equal(one, other) for one, other in zip(found, case.found(tiles), strict=True))


@pytest.mark.parametrize("first", [False, True], ids=["norm after", "norm first"])
@pytest.mark.parametrize(
    "tiles", [ONE, ONE_PRELOADED, FEW, PRELOADED, SHARED], ids=["one", "one preloaded", "few", "preloaded", "shared"]
)
def test_it_rounds_where_the_two_kernels_do(tiles: Tiles, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order of sums may differ, with the tiles: nearly every number is equal to the last bit."""
    monkeypatch.setattr(kernel, "NORMED_FIRST", (torch.float16,) if first else ())
    case = Case(2, 1, 32, [0, 2], 3, torch.float16)
    for found, separate in zip(case.found(tiles), case.separate(FEW), strict=True):
        assert (found == separate).float().mean() > 0.97


@pytest.mark.parametrize("tiles", [ONE, FEW, SHARED], ids=["one", "few", "shared"])
def test_prescaled_rows_equal_the_norm_kernels(tiles: Tiles) -> None:
    case, before = Case(2, 1, 32, [0, 2], 9), Tiles(16, 16, 32, warps=4, stages=2)
    weight = torch.randn(K, K, generator=torch.Generator().manual_seed(1)) * K**-0.5
    case.rows, case.prescaled = linear_and_prescale(case.rows, weight, None, case.rows, case.norm[0], tiles=before)
    assert case.prescaled is not None
    found = case.found(tiles)
    case.prescaled = None
    for one, other in zip(found, case.found(tiles), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
