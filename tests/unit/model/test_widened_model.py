"""A model widened r times computes the same logits, and is narrowed again to the same bits."""

from typing import Any

import pytest
import torch

from doubles import WIDENABLE_KINDS, fresh, hf_hidden, hf_logits, widened_pair
from foreword.errors import InputError, ModelUnsupported
from foreword.model import linears
from foreword.model.widened_model import WIDENABLE, narrow_model, widen_model
from foreword.model.widening import FROM_RANK, INTO_RANK, SEVERAL, Wide

TOKENS = [5, 9, 17, 30, 41, 8, 8, 23, 3, 44, 12]


@pytest.mark.parametrize("times", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", WIDENABLE_KINDS)
def test_logits_are_those_of_the_original(kind: str, times: int) -> None:
    model, wide = widened_pair(torch.float64, times, kind)
    torch.testing.assert_close(hf_logits(wide, TOKENS), hf_logits(model, TOKENS), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("times", [2, 8])
def test_logits_in_single_precision(times: int) -> None:
    model, wide = widened_pair(torch.float32, times)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(hf_logits(wide, TOKENS), hf_logits(model, TOKENS), rtol=1e-4, atol=1e-4)


def test_sizes_are_multiplied_and_tied_weights_stay_tied() -> None:
    model, wide = widened_pair(torch.float64, 4)
    assert wide.lm_head.weight is wide.model.embed_tokens.weight
    assert tuple(wide.lm_head.weight.shape) == (48, 4 * 32)
    assert wide.config.num_attention_heads == 16 and model.config.num_attention_heads == 4
    linears = [name for name, _ in model.named_parameters() if "proj" in name]
    sizes = {name: weight.numel() for name, weight in wide.named_parameters()}
    assert linears and all(sizes[name] == 16 * dict(model.named_parameters())[name].numel() for name in linears)


def test_the_residual_stream_is_copied_and_divided() -> None:
    model, wide = widened_pair(torch.float64, 4)
    for narrow, widened in zip(hf_hidden(model, TOKENS), hf_hidden(wide, TOKENS), strict=True):
        torch.testing.assert_close(widened, (narrow / 4).repeat(1, 4))


def test_half_precision_rounds_no_weight() -> None:
    model = fresh("llama", torch.bfloat16).requires_grad_(False)
    exact, wide = widen_model(model.double(), 8), widen_model(model.to(torch.bfloat16), 8)
    for (name, one), other in zip(wide.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(one.double(), other), name


def test_a_widened_model_is_rebuilt_like_any_other() -> None:
    model, wide = widened_pair(torch.float32, 2)
    before = hf_logits(wide, TOKENS)
    linears.fuse(wide)
    torch.testing.assert_close(hf_logits(wide, TOKENS), before, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelUnsupported, match="widen it before it is rebuilt"):
        widen_model(wide, 2)


def test_what_cannot_be_widened() -> None:
    for times in (0, 3, 6, -2, 2.0):
        with pytest.raises(InputError, match="power of two"):
            widen_model(fresh("llama"), times)  # type: ignore[arg-type]
    for family in ("qwen3", "gemma2", "olmo2", "granite"):
        with pytest.raises(ModelUnsupported, match=f"'{family}' cannot be widened; those of {', '.join(WIDENABLE)}"):
            widen_model(fresh(family), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WIDENABLE_KINDS)
def test_a_widened_model_is_narrowed_to_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    model, wide = widened_pair(dtype, 8, kind)
    narrow = narrow_model(wide, 8)
    assert narrow.config.to_dict() == model.config.to_dict()
    before, after = dict(model.named_parameters()), dict(narrow.named_parameters())
    assert before.keys() == after.keys()  # tied weights stay tied
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.equal(hf_logits(narrow.float(), TOKENS), hf_logits(model.float(), TOKENS))


@pytest.mark.parametrize("rule", [SEVERAL, Wide("stream", ("normed", "stream"))])
def test_weights_that_read_concatenated_rows_are_narrowed_too(rule: Any) -> None:
    weight = torch.arange(36.0).view(4, 9) + 1
    wide = rule.widened(weight, 4, 3)
    assert wide.shape == (16, 36) and torch.equal(rule.narrowed(wide, 4, 3), weight)


@pytest.mark.parametrize(("rule", "shape"), [(INTO_RANK, (4, 36)), (FROM_RANK, (16, 9))])
def test_rows_of_a_width_of_their_own_keep_it(rule: Any, shape: tuple[int, int]) -> None:
    """The same product, from wide rows or into them; the bias of what writes such a row is not repeated."""
    weight, rows = torch.arange(36.0).view(4, 9) + 1, torch.arange(9.0)
    wide, wide_rows = rule.widened(weight, 4, 9), rows.repeat(4 if rule is INTO_RANK else 1)
    assert wide.shape == shape and torch.equal(rule.narrowed(wide, 4, 9), weight)
    assert torch.equal(wide @ wide_rows, (weight @ rows).repeat(1 if rule is INTO_RANK else 4))
    assert rule.widened(weight[:, 0], 4, 9).shape == ((4,) if rule is INTO_RANK else (16,))
