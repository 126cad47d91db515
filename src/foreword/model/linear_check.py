"""Check, once for each unknown kind of linear, that it computes a row in the same way in every pass.

In: a model in memory, possibly quantised by another library. Out: nothing, or an error that names the linear and the reason.
Speculative decoding computes the same row in passes of different sizes, next to different rows. A linear whose activation
scales span all rows of a pass computes it differently each time. A linear that rounds each row to few steps amplifies the
small differences that all passes have. Linears that quantise only weights do neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foreword.errors import ModelUnsupported
from foreword.model.linears import FusedPart, JointLinear, PackedLinear
from foreword.model.plain_linears import is_plain_linear

ROW_COUNTS = (2, 5, 16)  # rows of a pass; kernels are chosen by their number
LOUDER = 64.0  # factor of the other rows, so that a scale that spans all rows differs from the row's own
EXACT, STEPS = 1e-4, 4.0  # how much two results may differ: EXACT, or STEPS times the epsilon of the dtype

INSTEAD = "quantise the weights alone, or load the model in float32, bfloat16 or float16"


def unknown_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take rows of a fixed width and are neither ordinary linears nor ours, by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "in_features", None), int)}
    ours = PackedLinear | JointLinear | FusedPart  # quantised ones of ours have no `in_features`
    return {name: one for name, one in found.items() if not is_plain_linear(one) and not isinstance(one, ours)}


@torch.no_grad()
def check_linears(model: PreTrainedModel, linears: dict[str, nn.Module]) -> None:
    """Refuse the first linear that cannot be used. One linear of each kind is checked."""
    checked = set()
    for name, linear in linears.items():
        kind = _kind(linear)
        if kind not in checked:
            checked.add(kind)
            with _evaluating(linear):
                _check(f"{name} ({_class_name(linear)})", linear, model)


def _check(name: str, linear: Any, model: PreTrainedModel) -> None:
    rows = _rows(linear.in_features, model)
    most = max(EXACT, STEPS * torch.finfo(model.dtype).eps)
    try:
        by_company, by_rounding = _error_next_to_louder_rows(linear, rows), _error_of_a_sum(linear, rows)
    except Exception as error:  # whatever a foreign kernel raises for rows that it does not take
        problem = f"{name} does not take rows of {model.dtype} on {model.device}: {error}"
        raise ModelUnsupported(f"{problem}; {INSTEAD}") from error
    if not by_company <= most:
        raise ModelUnsupported(
            f"{name} computes a row differently when other rows are in the same pass (off by {by_company:.1e}, where "
            f"{model.dtype} explains {most:.1e}): speculative decoding would change the output; {INSTEAD}"
        )
    if not by_rounding <= most:
        raise ModelUnsupported(
            f"{name} rounds its input rows to few steps (off by {by_rounding:.1e}, where {model.dtype} explains "
            f"{most:.1e}), so small differences between passes grow: speculative decoding would change the output; {INSTEAD}"
        )


def _error_next_to_louder_rows(linear: nn.Module, rows: Tensor) -> float:
    """Return how much the result of a row changes next to louder rows."""
    alone = linear(rows[:, :1])[0, 0]
    louder = torch.cat([rows[:, :1], LOUDER * rows[:, 1:]], dim=1)
    errors = [_relative_error(linear(louder[:, :count])[0, 0], alone) for count in ROW_COUNTS]
    return float(torch.tensor(errors).max())  # NaN if any is


def _error_of_a_sum(linear: nn.Module, rows: Tensor) -> float:
    """Return how much the result of a sum of rows differs from the sum of their results."""
    one, other = rows[:, :1], rows[:, 1:2]
    inputs = torch.cat([one, other, one + other, torch.zeros_like(one)], dim=1)
    of_one, of_other, of_sum, bias = linear(inputs)[0].double()
    return _relative_error(of_sum + bias - of_one, of_other)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the difference relative to the size of what was expected."""
    difference = (found.double() - expected.double()).pow(2).mean()
    return float((difference / expected.double().pow(2).mean()).sqrt())


def _rows(width: int, model: PreTrainedModel) -> Tensor:
    """Return random rows [1, n, width] of few digits, so that the sum of two is not rounded in any dtype."""
    sampled = torch.randn(1, max(ROW_COUNTS), width, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    return ((16 * sampled).round() / 16).to(model.device, model.dtype)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch dropout off inside this block, and restore the training modes afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _kind(linear: nn.Module) -> tuple[Any, ...]:
    """Return all public attributes of a linear and of its weight: linears with equal ones compute in the same way."""
    weight = getattr(linear, "weight", None)
    return type(linear), type(weight), repr(linear), _public_attributes(linear), _public_attributes(weight)


def _public_attributes(thing: object) -> tuple[tuple[str, str], ...]:
    public = {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}
    return tuple((name, repr(value)) for name, value in public.items() if not isinstance(value, Tensor | nn.Module))


def _class_name(linear: nn.Module) -> str:
    """Return the name of its class, or for an ordinary linear that of its weight's class."""
    kind = type(linear.weight) if type(linear) is nn.Linear else type(linear)
    return f"{kind.__module__}.{kind.__qualname__}"
