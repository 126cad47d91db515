"""Draft linears: full precision where int8 does not apply, and codes that follow the weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from foreword.model import draft_linears
from foreword.model.draft_linears import DraftLinears, int8_codes


def test_on_a_cpu_the_outputs_are_concatenated() -> None:
    one, two = nn.Linear(6, 3), nn.Linear(6, 4, bias=False)
    rows = torch.randn(2, 5, 6)
    assert torch.equal(DraftLinears(one, two)(rows), torch.cat([one(rows), two(rows)], dim=-1))
    assert torch.equal(DraftLinears(one)(rows), one(rows))


def test_a_second_input_is_concatenated_or_has_its_own_linears() -> None:
    rows, second, norm = torch.randn(2, 5, 6), torch.randn(2, 5, 6), nn.RMSNorm(6, eps=1e-3)
    long, one, two = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(6, 4, bias=False)
    product = long(torch.cat([rows, second], dim=-1))
    assert torch.equal(DraftLinears(long)(rows, second), product)
    split = DraftLinears(one, two, second_from=1)(rows, second, norm)
    assert torch.equal(split, torch.cat([one(norm(rows)), two(second)], dim=-1))
    times = torch.rand(2, 5, 1)
    assert torch.equal(
        DraftLinears(long).onto(rows, rows, second, silu=True, times=times), times * (rows + functional.silu(product))
    )
    assert torch.equal(DraftLinears(one).onto(rows, second), rows + one(second))


def test_int8_codes_are_the_nearest() -> None:
    weight = torch.randn(7, 33)
    weight[2] = 0
    codes, scales = int8_codes(weight)
    assert codes.dtype == torch.int8 and codes.abs().amax(1).tolist() == [127, 127, 0, 127, 127, 127, 127]
    assert ((codes * scales - weight).abs() <= scales * 0.5001).all()


def test_codes_stack_all_linears_and_follow_their_weights() -> None:
    one, two = nn.Linear(6, 3), nn.Linear(6, 4, bias=False)
    both = DraftLinears(one, two)
    first, scales, bias = both.codes()
    assert both.codes()[0] is first  # nothing has changed
    assert first.shape == (7, 6) and bias is not None and torch.equal(bias[:3], one.bias) and not bias[3:].any()
    torch.testing.assert_close(first * scales, torch.cat([one.weight, two.weight]), atol=0.01, rtol=0)
    with torch.no_grad():
        two.weight.mul_(-1)
    before = first.clone()
    assert torch.equal(both.codes()[0][3:], -before[3:])
    assert both.codes()[0] is first  # captured rounds read it there
    one.weight = nn.Parameter(torch.zeros(3, 6))
    assert not both.codes()[0][:3].any()
    one.to(torch.bfloat16), two.to(torch.bfloat16)
    assert both.codes()[2] is not bias  # another dtype needs a new tensor
    assert DraftLinears(two).codes()[2] is None


def test_a_norm_is_folded_into_the_linears_that_read_the_rows() -> None:
    one, two, norm = nn.Linear(6, 3), nn.Linear(6, 4), nn.RMSNorm(6)
    both = DraftLinears(one, two, second_from=1)
    plain = both.codes()
    nn.init.uniform_(norm.weight, 0.5, 2)
    codes, scales, bias = both.codes(norm)
    torch.testing.assert_close(codes[:3] * scales[:3], one.weight * norm.weight, atol=0.01, rtol=0)
    assert torch.equal(codes[3:], plain[0][3:]) and bias is not None and torch.equal(bias[:3], one.bias)
    with torch.no_grad():
        norm.weight.mul_(2)
    assert both.codes(norm)[0] is codes and torch.equal(both.codes(norm)[1][3:], plain[1][3:])
    torch.testing.assert_close(codes[:3] * scales[:3], one.weight * norm.weight, atol=0.02, rtol=0)
    assert both.codes()[0] is plain[0]


def test_codes_made_in_inference_mode_follow_the_weights_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding a weight a few rows at a time gives the same codes."""
    monkeypatch.setattr(draft_linears, "AT_ONCE", 2)
    linear = nn.Linear(6, 5)
    product = DraftLinears(linear)
    with torch.inference_mode():
        codes, scales, _ = product.codes()
    assert all(map(torch.equal, (codes, scales), int8_codes(linear.weight)))
    with torch.no_grad():
        linear.weight.mul_(-1)
    assert product.codes()[0] is codes and not scales.requires_grad
    assert torch.equal(codes, int8_codes(linear.weight)[0])


def test_a_copy_follows_the_copied_weights() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.product = DraftLinears(self.linear)

    other = copy.deepcopy(part := Part())
    assert set(dict(part.named_parameters())) == {"linear.weight", "linear.bias"}
    assert other.product.linears[0] is other.linear is not part.linear
