"""Compiled products with quantised weights: as exact as float32 allows, and the same bits for a row in any company."""

from itertools import product as product_of

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from foreword.ops.group_codes import GroupCodes, Layout, PackedCodes
from foreword.ops.layer import code_products
from foreword.ops.layer.code_products import FORMS, Form, form_of_this_cpu, product

USED = [
    Layout(4, 32, half=True, minimum=True),
    Layout(4, 32, half=False, minimum=True),
    Layout(4, 32, half=True, minimum=False),
    Layout(8, 32, half=True, minimum=False),
    Layout(8, 16, half=False, minimum=False),
]
RUNNABLE = [form for form in FORMS if FORMS.index(form) >= FORMS.index(form_of_this_cpu())]
CASES = [(form, layout) for form, layout in product_of(RUNNABLE, USED) if form.half or not layout.half]
each_case = pytest.mark.parametrize(("form", "layout"), CASES, ids=lambda one: getattr(one, "name", None) or str(one))


def random_weight(layout: Layout, outputs: int = 100, inputs: int = 96) -> PackedCodes:
    generator = torch.Generator().manual_seed(5)
    lowest = 0 if layout.minimum else -(2 ** (layout.bits - 1))
    highest = 16 if layout == (4, *layout[1:3], True) else 2 ** (layout.bits - 1)
    codes = torch.randint(lowest, highest, (outputs, inputs), generator=generator).to(torch.int8)
    scale, minimum = torch.randn(2, outputs, inputs // layout.group, generator=generator) * 0.01
    stored = torch.float16 if layout.half else torch.float32
    weight = GroupCodes(layout.bits, codes, scale.to(stored), minimum.to(stored) if layout.minimum else None)
    return PackedCodes.of(weight, layout.half)


def multiplied(rows: torch.Tensor, weight: PackedCodes, form: Form, threads: int = 1) -> torch.Tensor:
    out = torch.full((len(rows), weight.outputs), torch.nan)
    product(rows.contiguous(), weight, out, threads, form)
    return out


@each_case
def test_a_product_is_that_of_the_dequantised_weights(form: Form, layout: Layout) -> None:
    """Against float64, with the error that sums of float32 have: some units of the sum of magnitudes."""
    weight, rows = random_weight(layout), torch.randn(71, 96, generator=torch.Generator().manual_seed(1))
    exact = weight.dequantised().double()
    error = (multiplied(rows, weight, form).double() - rows.double() @ exact.T).abs()
    codes = weight.codes(torch.arange(weight.outputs))
    signed = codes._replace(minimum=None).dequantised().double().abs()  # scale * code and minimum may cancel each other
    lowest = 0 if codes.minimum is None else codes.minimum.double().abs().repeat_interleave(layout.group, 1)
    assert (error <= 8 * 2.0**-24 * (rows.double().abs() @ (signed + lowest).T)).all()


@each_case
def test_a_row_has_the_same_bits_in_any_company(form: Form, layout: Layout) -> None:
    weight, rows = random_weight(layout), torch.randn(71, 96, generator=torch.Generator().manual_seed(1))
    whole = multiplied(rows, weight, form)
    for count in (1, 2, 3, 4, 5, 7, 8, 12, 16, 63, 64, 65):
        for first in range(0, 72 - count, 9):
            louder = rows[first : first + count].clone()
            assert torch.equal(multiplied(louder, weight, form), whole[first : first + count])
            louder[1:] *= 1000
            assert torch.equal(multiplied(louder, weight, form)[0], whole[first])


def test_threads_do_not_change_a_bit() -> None:
    form, weight = form_of_this_cpu(), random_weight(USED[0] if form_of_this_cpu().half else USED[1], 2000, 512)
    for count in (1, 5, 64):
        rows = torch.randn(count, 512)
        alone = multiplied(rows, weight, form)
        for threads in (2, 3):
            assert torch.equal(multiplied(rows, weight, form, threads), alone)


def test_the_result_may_be_columns_of_a_larger_one() -> None:
    weight, rows = random_weight(USED[4]), torch.randn(5, 96)
    out = torch.zeros(5, 300)
    product(rows, weight, out[:, 7:107])
    assert torch.equal(out[:, 7:107], multiplied(rows, weight, form_of_this_cpu()))
    assert not out[:, :7].any() and not out[:, 107:].any(), "nothing is written beyond the last output"


def test_nan_shows() -> None:
    weight, rows = random_weight(USED[4]), torch.randn(3, 96)
    rows[1, 40] = torch.nan
    found = multiplied(rows, weight, form_of_this_cpu())
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_the_form_follows_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    class Codegen:
        features = ""

        def magic_tuple(self) -> tuple[str, str, str]:
            return "triple", "name", self.features

    monkeypatch.setattr(type(code_products.cpu_target.target_context), "codegen", lambda _: Codegen())
    for features, name in (
        ("+avx512f,+avx2,+fma,+f16c", "avx512"),
        ("-avx512f,+avx2,+fma,+f16c", "avx2"),
        ("+avx2,-fma,+f16c", "portable"),
        ("+neon", "portable"),
    ):
        Codegen.features = features
        assert form_of_this_cpu.__wrapped__().name == name


def test_sums_of_groups_are_in_order() -> None:
    """A layout with minimums of ones and codes of 0 gives the sum of each row."""
    layout = Layout(4, 32, half=False, minimum=True)
    codes, one = torch.zeros(64, 96, dtype=torch.int8), torch.ones(64, 3)
    rows = torch.arange(2 * 96, dtype=torch.float32).view(2, 96)
    found = multiplied(rows, PackedCodes.of(GroupCodes(4, codes, one, one), layout.half), form_of_this_cpu())
    assert np.array_equal(found[:, 0].numpy(), rows.sum(1).numpy())
