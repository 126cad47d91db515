"""Linears of unknown kinds: those that quantise only weights are accepted; those whose rows depend on each other or are
rounded are refused. Libraries use classes of their own, or ordinary linears with a tensor class of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from doubles import fresh
from foreword.errors import ModelUnsupported
from foreword.model.draft_linears import int8_codes
from foreword.model.fingerprint import Fingerprint
from foreword.model.linear_check import check_linears, unknown_linears
from foreword.model.linears import kinds, pack
from foreword.model.model import Model
from foreword.model.plain_linears import is_plain_linear


def rounded_to_int8(rows: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return rows rounded to int8, with one scale for all values along `dims`."""
    scale = rows.abs().amax(dims, keepdim=True).clamp(min=1e-4) / 127
    return (rows / scale).round() * scale


class WeightOnly(nn.Linear):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        whole, scale = int8_codes(linear.weight.detach())
        self.weight, self.bias = nn.Parameter((whole * scale).to(linear.weight.dtype)), linear.bias


class ScaledByPass(WeightOnly):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rounded_to_int8(rows, (-1, -2)))


class ScaledByRow(WeightOnly):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rounded_to_int8(rows, (-1,)))


class NoLinear(nn.Module):
    """A class that does not derive from torch's linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.inner = linear.in_features, ScaledByPass(linear)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows)


class Broken(WeightOnly):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * torch.nan


class Refusing(WeightOnly):
    def forward(self, rows: Tensor) -> Tensor:
        raise RuntimeError("expected scalar type Double")


class Codes(Tensor):
    """A weight of a class of its own, which may round the rows it is multiplied with."""

    rounds_rows = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            rows, weight, *more = args
            rows = rounded_to_int8(rows, (-1,)) if weight.rounds_rows else rows
            return functional.linear(rows, weight.as_subclass(Tensor), *more)
        return super().__torch_function__(func, types, args, kwargs or {})


def coded(linear: nn.Linear, rounds_rows: bool) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Codes), requires_grad=False)  # type: ignore[misc]
    linear.weight.rounds_rows = rounds_rows  # type: ignore[attr-defined]
    return linear


def with_linears(make: Any, names: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny model whose linears, or those with these names, are replaced."""
    hf = fresh("llama", dtype, tie_word_embeddings=False).requires_grad_(False)
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (not names or name in names):
                setattr(parent, name, make(child).to(dtype))
    return hf


def check(hf: PreTrainedModel) -> None:
    check_linears(hf, unknown_linears(hf))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linears_that_quantise_only_weights_are_accepted(dtype: torch.dtype) -> None:
    hf = with_linears(WeightOnly, dtype=dtype)
    assert len(unknown_linears(hf)) == 4 * 7 + 1
    check(hf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [ScaledByPass, NoLinear])
def test_linears_whose_scales_span_all_rows_are_refused(make: Any, dtype: torch.dtype) -> None:
    with pytest.raises(
        ModelUnsupported, match=rf"q_proj \(.*{make.__name__}\).*other rows are in the same pass.*weights alone"
    ):
        check(with_linears(make, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_linears_that_round_rows_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelUnsupported, match=r"q_proj \(.*ScaledByRow\) rounds its input rows.*weights alone"):
        check(with_linears(ScaledByRow, dtype=dtype))


def test_linears_that_round_no_more_than_the_dtype_are_accepted() -> None:
    check(with_linears(ScaledByRow, dtype=torch.bfloat16))


@pytest.mark.parametrize("place", ["down_proj", "lm_head"])
def test_one_bad_linear_among_many_is_found(place: str) -> None:
    with pytest.raises(ModelUnsupported, match=rf"{place} \(.*ScaledByPass\)"):
        check(with_linears(ScaledByPass, (place,)))


@pytest.mark.parametrize(
    ("make", "message"), [(Broken, "off by nan"), (Refusing, "does not take rows of torch.float32 on cpu")]
)
def test_linears_that_cannot_be_run_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        check(with_linears(make))


def test_ordinary_linears_with_other_weights() -> None:
    """Two linears that differ only in an attribute of their weights are two kinds."""
    hf = with_linears(lambda linear: coded(linear, rounds_rows=False))
    assert not any(map(is_plain_linear, hf.modules())) and unknown_linears(hf)
    check(hf)
    coded(hf.model.layers[3].mlp.up_proj, rounds_rows=True)
    with pytest.raises(ModelUnsupported, match=r"layers\.3\.mlp\.up_proj \(.*\.Codes\) rounds its input rows"):
        check(hf)


def test_one_linear_of_each_kind_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[nn.Module] = []
    forward = WeightOnly.forward
    monkeypatch.setattr(WeightOnly, "forward", lambda self, rows: (called.append(self), forward(self, rows))[1])
    check(with_linears(WeightOnly))
    assert len(set(called)) == 5, "q and o, k and v, gate and up, down, and the head, of one layer"


def test_a_check_restores_the_training_modes() -> None:
    """It switches dropout off, with which no row would be computed twice in the same way."""
    hf = with_linears(lambda linear: nn.Sequential(nn.Dropout(0.5), WeightOnly(linear))).train()
    for module in hf.modules():
        if isinstance(module, nn.Sequential):
            module.in_features = module[1].in_features
    hf.model.layers[0].mlp.up_proj.eval()
    before = [module.training for module in hf.modules()]
    check(hf)
    assert [module.training for module in hf.modules()] == before


def test_ordinary_linears_and_ours_are_not_checked() -> None:
    hf = fresh("llama", torch.float32)
    assert not unknown_linears(hf)
    pack(hf.requires_grad_(False))
    assert not unknown_linears(hf)


def test_kinds_distinguish_classes_of_weights() -> None:
    """Costs are stored by kind; the shapes are the same here."""
    models = [with_linears(make) for make in (lambda one: one, lambda one: coded(one, False), WeightOnly)]
    assert len({tuple(kinds(model)) for model in models}) == 3


def test_a_fingerprint_compares_values_whatever_the_class_of_a_weight() -> None:
    prints = [
        Fingerprint.of(Model(with_linears(make))) for make in (lambda one: one, lambda one: coded(one, False), WeightOnly)
    ]
    assert prints[0].matches(prints[1]) and not prints[0].matches(prints[2])
