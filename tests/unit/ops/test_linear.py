"""Products of few rows against plain torch in float32, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

pytest.importorskip("triton")

from foreword.ops.layer import linear as kernel
from foreword.ops.layer.linear import Prescaled, few_rows_linear, linear_and_prescale
from foreword.ops.layer.tiles import Tiles

SMALL = Tiles(16, 16, 32, warps=4, stages=2)
SHARED = replace(SMALL, splits=2)
PRELOADED = replace(SMALL, stages=0)
ONE = Tiles(1, 8, 64, warps=4, stages=2)
ONE_PRELOADED = replace(ONE, stages=0)


class Case:
    def __init__(self, rows: int, n: int, k: int, gated: bool = False) -> None:
        generator = torch.Generator().manual_seed(rows * n + k)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tall = 2 * n if gated else n
        self.rows, self.weight, self.bias = random(rows, k), random(tall, k) * k**-0.5, random(tall)
        self.norm, self.residual, self.gated = (1 + random(k) / 4, 1e-3), random(rows, n), gated

    def check(self, tiles: Tiles | None, normed: bool, biased: bool, added: bool) -> None:
        norm, bias = self.norm if normed else None, self.bias if biased else None
        residual = self.residual if added else None
        found = few_rows_linear(self.rows, self.weight, bias, norm=norm, residual=residual, gated=self.gated, tiles=tiles)
        rows = rms_norm(self.rows, self.rows.shape[-1:], *self.norm) if normed else self.rows
        exact = linear(rows, self.weight, bias)
        if self.gated:
            exact = silu(exact.chunk(2, dim=-1)[0]) * exact.chunk(2, dim=-1)[1]
        exact = exact + self.residual if added else exact
        assert found.shape == exact.shape and found.is_contiguous()
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 17, 64, 100])
def test_any_number_of_rows(rows: int, gated: bool) -> None:
    """With the default tiles, a remainder in K, and columns that do not fill a whole number of programs."""
    Case(rows, 37, 200, gated).check(None, normed=True, biased=False, added=True)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    n=st.integers(2, 24),
    k=st.integers(1, 9).map(lambda eighths: 8 * eighths),
    gated=st.booleans(),
    steps=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    tiles=st.sampled_from([SMALL, ONE]),
)
def test_any_steps_at_any_size(rows: int, n: int, k: int, gated: bool, steps: tuple[bool, bool, bool], tiles: Tiles) -> None:
    Case(min(rows, 2) if tiles == ONE else rows, n, k, gated).check(tiles, *steps)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("k", "splits"), [(256, 2), (200, 2), (200, 3), (40, 4)])
def test_programs_that_share_a_sum(k: int, splits: int, normed: bool) -> None:
    """Also if the last ones have nothing left to add."""
    Case(17, 20, k).check(Tiles(16, 16, 32, warps=4, stages=2, splits=splits), normed, biased=True, added=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "tiles", [Tiles(16, 16, 64, 4, 0), Tiles(16, 16, 64, 8, 0), Tiles(1, 8, 64, 2, 0), Tiles(1, 4, 64, 4, 0)]
)
@pytest.mark.parametrize("k", [24, 64, 72, 130, 576])
def test_preloaded_weights(k: int, tiles: Tiles, gated: bool) -> None:
    """Shares that are full, partly filled and empty. In half precision: longer numbers are not preloaded."""
    case = Case(17 if tiles.block_m > 1 else 2, 20, k, gated)
    rows, weight, residual = case.rows.half(), case.weight.half(), case.residual.half()
    found = few_rows_linear(rows, weight, norm=case.norm, residual=residual, gated=gated, tiles=tiles)
    exact = linear(rms_norm(rows.float(), (k,), *case.norm), weight.float())
    exact = (silu(exact.chunk(2, dim=-1)[0]) * exact.chunk(2, dim=-1)[1] if gated else exact) + residual.float()
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=1e-2)


def test_rows_keep_their_shape() -> None:
    case = Case(6, 20, 48)
    wide = torch.cat([case.rows, case.rows], dim=1).view(2, 3, 96)[..., :48]
    found = few_rows_linear(wide, case.weight, residual=case.residual.view(2, 3, 20), tiles=SMALL)
    assert torch.equal(found, few_rows_linear(case.rows, case.weight, residual=case.residual, tiles=SMALL).view(2, 3, 20))
    assert few_rows_linear(wide[:0], case.weight).shape == (0, 3, 20)


@pytest.mark.parametrize("first", [False, True], ids=["norm after", "norm first"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_rounded_alike_alone_and_among_others(gated: bool, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision only the order of sums may differ: nearly every number is equal to the last bit.

    Triton's interpreter has no products in bfloat16; its code path runs here in float16.
    """
    monkeypatch.setattr(kernel, "NORMED_FIRST", (torch.float16,) if first else ())
    case = Case(5, 48, 100, gated)
    rows, weight, norm = case.rows.half(), case.weight.half(), (case.norm[0].half(), case.norm[1])
    alone = torch.cat([few_rows_linear(row, weight, norm=norm, gated=gated, tiles=ONE) for row in rows.split(1)])
    for tiles in (SMALL, PRELOADED, ONE_PRELOADED) if gated else (SMALL, PRELOADED, ONE_PRELOADED, SHARED):
        among = few_rows_linear(rows, weight, norm=norm, gated=gated, tiles=tiles)
        assert (alone == among).float().mean() > 0.95


@pytest.mark.parametrize(
    "tiles", [ONE, ONE_PRELOADED, SMALL, PRELOADED, SHARED], ids=["one", "one preloaded", "few", "preloaded", "shared"]
)
def test_long_rows_in_float16(tiles: Tiles) -> None:
    """Rows that would overflow when multiplied by the norm's weight, if they were not normalised first."""
    case = Case(3, 20, 48)
    rows, norm = (case.rows * 8000).half(), (case.norm[0].half() * 16, case.norm[1])
    found = few_rows_linear(rows, case.weight.half(), norm=norm, tiles=tiles)
    exact = linear(rms_norm(rows.float(), (48,), norm[0].float(), norm[1]), case.weight.half().float())
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=3e-2)


def linear_and_prescaled(case: Case, tiles: Tiles, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Prescaled | None]:
    """Run a case's rows through a product that adds to the residual stream, and prescale them for the next norm."""
    weight, bias = (part.to(dtype) for part in (case.weight, case.bias))
    rows, residual = case.rows.to(dtype), case.residual.to(dtype)
    return linear_and_prescale(rows, weight, bias, residual, (1 + case.bias / 4).to(dtype), tiles=tiles)


@pytest.mark.parametrize("before", [SMALL, PRELOADED, SHARED], ids=["few", "preloaded", "shared"])
@pytest.mark.parametrize(("rows", "n", "k"), [(5, 40, 64), (17, 37, 100), (16, 600, 32)])
def test_prescaled_rows_equal_the_norm_kernels(
    rows: int, n: int, k: int, before: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit in half precision, except for the sums of squares: there is one for every block of columns."""
    monkeypatch.setattr(kernel, "NORMED_FIRST", ())
    case = Case(rows, n, k)
    out, prescaled = linear_and_prescaled(case, before, torch.float16)
    plain = [part.half() for part in (case.rows, case.weight, case.bias)]
    assert torch.equal(out, few_rows_linear(*plain, residual=case.residual.half(), tiles=before))
    assert prescaled is not None and prescaled.source is out
    assert torch.equal(prescaled.rows, (out.float() * (1 + case.bias / 4).half().float()).half())
    blocks = out.float().square().split(512 if before.splits > 1 else before.block_n, dim=1)
    torch.testing.assert_close(prescaled.squares, torch.stack([block.sum(1) for block in blocks]))


@pytest.mark.parametrize("before", [SMALL, SHARED], ids=["few", "shared"])
@pytest.mark.parametrize("after", [SMALL, SHARED, ONE], ids=["few", "shared", "one"])
def test_a_product_of_prescaled_rows_is_norm_and_product(before: Tiles, after: Tiles) -> None:
    case, second = Case(17, 72, 64), Case(17, 20, 72)
    out, prescaled = linear_and_prescaled(case, before)
    norm = (1 + case.bias / 4, 1e-3)
    for gated in (False, True) if after.splits == 1 else (False,):
        found, apart = (
            few_rows_linear(out, second.weight, norm=norm, prescaled=given, gated=gated, tiles=after)
            for given in (prescaled, None)
        )  # fmt: skip
        torch.testing.assert_close(found, apart, rtol=1e-6, atol=1e-6)


def test_prescaled_rows_are_used_for_their_very_source_only() -> None:
    case, second = Case(9, 72, 64), Case(9, 20, 72)
    out, prescaled = linear_and_prescaled(case, SMALL)
    assert prescaled is not None
    broken = prescaled._replace(rows=prescaled.rows * float("nan"))
    for rows, used in ((out, True), (out[:], False), (out.clone(), False), (torch.cat([out, out]), False)):
        found = few_rows_linear(rows, second.weight, norm=(1 + case.bias / 4, 1e-3), prescaled=broken, tiles=SMALL)
        assert found.isnan().all().item() is used and found.isnan().any().item() is used


def test_no_rows_are_prescaled_if_norms_are_inside_or_first() -> None:
    case = Case(3, 40, 64)
    assert linear_and_prescaled(case, ONE)[1] is None and linear_and_prescaled(case, SMALL, torch.float16)[1] is None
