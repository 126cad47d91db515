"""Codes are packed and read back without a loss, and rounding weights to codes is as exact as their bits allow."""

from itertools import product as product_of

import pytest
import torch

from foreword.ops.group_codes import GroupCodes, Layout, PackedCodes, quantised

LAYOUTS = [Layout(*one) for one in product_of((4, 8), (16, 32), (True, False), (True, False))]


def random_codes(layout: Layout, outputs: int, inputs: int) -> GroupCodes:
    """Return codes of the whole range of a layout, with positive and negative scales."""
    generator = torch.Generator().manual_seed(sum(layout) + outputs)
    lowest, highest = {4: (0, 16) if layout.minimum else (-8, 8), 8: (-128, 128)}[layout.bits]
    codes = torch.randint(lowest, highest, (outputs, inputs), generator=generator).to(torch.int8)
    scale, minimum = torch.randn(2, outputs, inputs // layout.group, generator=generator) * 0.01
    if layout.half:
        scale, minimum = scale.half(), minimum.half()
    return GroupCodes(layout.bits, codes, scale, minimum if layout.minimum else None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("outputs", [1, 64, 100])
def test_what_is_packed_is_read_back(layout: Layout, outputs: int) -> None:
    weight = random_codes(layout, outputs, 96)
    packed, exact = PackedCodes.of(weight, layout.half), weight.dequantised()
    assert packed.layout == layout and packed.blocks.data_ptr() % 64 == 0
    assert packed.bytes * 8 == packed.blocks.shape[0] * 64 * 96 * layout.bits_per_weight
    assert torch.equal(packed.dequantised(), exact)
    some = torch.randint(0, outputs, (7,))
    assert torch.equal(packed.rows(some), exact[some])
    places = torch.randint(0, exact.numel(), (50,))
    assert torch.equal(packed.elements(places), exact.flatten()[places])
    assert torch.equal(packed.without_half().dequantised(), exact)
    assert torch.equal(packed.codes(some).codes, weight.codes[some])


def test_scales_that_float16_cannot_hold_stay_in_float32() -> None:
    weight = random_codes(Layout(8, 32, half=False, minimum=False), 64, 64)
    assert not PackedCodes.of(weight).layout.half
    assert PackedCodes.of(weight._replace(scale=weight.scale.half())).layout.half


def test_joined_weights_follow_each_other() -> None:
    layout = Layout(4, 32, half=True, minimum=True)
    parts = [PackedCodes.of(random_codes(layout, outputs, 64)) for outputs in (64, 192)]
    whole = PackedCodes.joined(parts)
    assert whole.outputs == 256 and torch.equal(whole.dequantised(), torch.cat([part.dequantised() for part in parts]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-7, 1.0, 1e6])
def test_rounding_errs_by_at_most_half_a_step(bits: int, size: float) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) * size
    weight[3], weight[4, :32] = 0, 0.25 * size  # groups of equal weights
    found = quantised(weight, bits)
    step = found.scale.float().repeat_interleave(32, 1)
    slack = weight.abs().amax() * 2.0**-10  # scales and minimums are rounded to float16
    assert ((found.dequantised() - weight).abs() <= step / 2 + slack).all()
    assert torch.equal(found.dequantised()[3], weight[3])


def test_the_reference_multiplies_by_the_dequantised_weights() -> None:
    weight = random_codes(Layout(8, 16, half=False, minimum=False), 20, 32)
    rows = torch.randn(3, 32)
    torch.testing.assert_close(PackedCodes.of(weight, half=False).product(rows), rows @ weight.dequantised().T)
