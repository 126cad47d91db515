"""Products of few rows against plain torch in float32, through Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

pytest.importorskip("triton")

from foreword.kernels import linear as kernel
from foreword.kernels.linear import few_rows_linear
from foreword.kernels.tiles import Tiles

SMALL = Tiles(16, 16, 32, warps=4, stages=2)
INSIDE = replace(SMALL, norm_inside=True)
SHARED = replace(SMALL, splits=2)
ONE = Tiles(1, 8, 64, warps=4, stages=2)


class Case:
    def __init__(self, rows: int, n: int, k: int, gated: bool = False) -> None:
        generator = torch.Generator().manual_seed(rows * n + k)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tall = 2 * n if gated else n
        self.rows, self.weight, self.bias = drawn(rows, k), drawn(tall, k) * k**-0.5, drawn(tall)
        self.norm, self.residual, self.gated = (1 + drawn(k) / 4, 1e-3), drawn(rows, n), gated

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
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 64, 100])
def test_any_number_of_rows(rows: int, gated: bool) -> None:
    """With the default tiles, a remainder in K and columns that fill no whole number of programs."""
    Case(rows, 37, 200, gated).check(None, normed=True, biased=False, added=True)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    n=st.integers(2, 24),
    k=st.integers(1, 9).map(lambda eighths: 8 * eighths),
    gated=st.booleans(),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    tiles=st.sampled_from([SMALL, INSIDE, ONE]),
)
def test_any_parts_at_any_size(rows: int, n: int, k: int, gated: bool, parts: tuple[bool, bool, bool], tiles: Tiles) -> None:
    Case(min(rows, 2) if tiles == ONE else rows, n, k, gated).check(tiles, *parts)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("k", "splits"), [(256, 2), (200, 2), (200, 3), (40, 4)])
def test_programs_that_share_a_sum(k: int, splits: int, normed: bool) -> None:
    """Also where the last ones have nothing left to add."""
    Case(17, 20, k).check(Tiles(16, 16, 32, warps=4, stages=2, splits=splits), normed, biased=True, added=True)


def test_rows_keep_their_shape() -> None:
    case = Case(6, 20, 48)
    wide = torch.cat([case.rows, case.rows], dim=1).view(2, 3, 96)[..., :48]
    found = few_rows_linear(wide, case.weight, residual=case.residual.view(2, 3, 20), tiles=SMALL)
    assert torch.equal(found, few_rows_linear(case.rows, case.weight, residual=case.residual, tiles=SMALL).view(2, 3, 20))
    assert few_rows_linear(wide[:0], case.weight).shape == (0, 3, 20)


@pytest.mark.parametrize("first", [False, True], ids=["norm behind", "norm first"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_rounded_alike_alone_and_among_others(gated: bool, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, where only the order of sums may differ: nearly every number is the same to the last bit.

    Triton's interpreter has no products in bfloat16; what is done for it is done here in float16.
    """
    monkeypatch.setattr(kernel, "NORMED_FIRST", (torch.float16,) if first else ())
    case = Case(5, 48, 100, gated)
    rows, weight, norm = case.rows.half(), case.weight.half(), (case.norm[0].half(), case.norm[1])
    alone = torch.cat([few_rows_linear(row, weight, norm=norm, gated=gated, tiles=ONE) for row in rows.split(1)])
    for tiles in (SMALL, INSIDE) if gated else (SMALL, INSIDE, SHARED):
        among = few_rows_linear(rows, weight, norm=norm, gated=gated, tiles=tiles)
        assert (alone == among).float().mean() > 0.95


@pytest.mark.parametrize("tiles", [ONE, SMALL, INSIDE, SHARED], ids=["one", "few", "inside", "shared"])
def test_long_rows_in_float16(tiles: Tiles) -> None:
    """Rows that a norm's weight would make too large for it, if they were not normalised first."""
    case = Case(3, 20, 48)
    rows, norm = (case.rows * 8000).half(), (case.norm[0].half() * 16, case.norm[1])
    found = few_rows_linear(rows, case.weight.half(), norm=norm, tiles=tiles)
    exact = linear(rms_norm(rows.float(), (48,), norm[0].float(), norm[1]), case.weight.half().float())
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=3e-2)
