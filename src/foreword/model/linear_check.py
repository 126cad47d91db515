"""Whether linears of an unknown kind answer a row in the same way in every pass: measured, once for each kind.

In: a model in memory, which others may have quantised. Out: nothing, or the linear that is refused and why. Speculative
decoding computes the same row in passes of different sizes, next to different rows. A linear whose activation scales span
all rows of a pass answers it differently each time. One that rounds each row to few steps makes large differences of the
smallest ones, which every pass has. Linears that quantise weights alone do neither.
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

COMPANY = (2, 5, 16)  # rows of a pass; kernels are chosen by their number
LOUDER = 64.0  # than the row in question, so that a scale that spans all rows is not its own
EXACT, STEPS = 1e-4, 4.0  # how far two answers may be apart: this, or so many steps of the dtype's own rounding

INSTEAD = "quantise the weights alone, or load the model in float32, bfloat16 or float16"


def unknown_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that take rows of a fixed width and are neither ordinary linears nor ours, by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "in_features", None), int)}
    ours = PackedLinear | JointLinear | FusedPart
    return {name: one for name, one in found.items() if not is_plain_linear(one) and not isinstance(one, ours)}


@torch.no_grad()
def check_linears(model: PreTrainedModel, linears: dict[str, nn.Module]) -> None:
    """Refuse the first linear that cannot serve; of each kind one is measured."""
    measured = set()
    for name, linear in linears.items():
        kind = _kind(linear)
        if kind not in measured:
            measured.add(kind)
            with _evaluating(linear):
                _check(f"{name} ({_called(linear)})", linear, model)


def _check(name: str, linear: Any, model: PreTrainedModel) -> None:
    rows = _rows(linear.in_features, model)
    most = max(EXACT, STEPS * torch.finfo(model.dtype).eps)
    try:
        apart, rounded = _apart_in_company(linear, rows), _apart_from_sum(linear, rows)
    except Exception as error:  # whatever a foreign kernel says to rows that it does not take
        told = f"{name} does not take rows of {model.dtype} on {model.device}: {error}"
        raise ModelUnsupported(f"{told}; {INSTEAD}") from error
    if not apart <= most:
        raise ModelUnsupported(
            f"{name} gives a row another answer when other rows are in the same pass (off by {apart:.1e}, where "
            f"{model.dtype} explains {most:.1e}): speculative decoding would change the output; {INSTEAD}"
        )
    if not rounded <= most:
        raise ModelUnsupported(
            f"{name} rounds the rows that it is given to few steps (off by {rounded:.1e}, where {model.dtype} explains "
            f"{most:.1e}), so small differences between passes grow: speculative decoding would change the output; {INSTEAD}"
        )


def _apart_in_company(linear: nn.Module, rows: Tensor) -> float:
    """How far the answer to a row is from its answer next to louder rows."""
    alone = linear(rows[:, :1])[0, 0]
    louder = torch.cat([rows[:, :1], LOUDER * rows[:, 1:]], dim=1)
    return float(torch.tensor([_apart(linear(louder[:, :count])[0, 0], alone) for count in COMPANY]).max())  # NaN if any is


def _apart_from_sum(linear: nn.Module, rows: Tensor) -> float:
    """How far the answer to a sum is from the sum of the answers."""
    one, other = rows[:, :1], rows[:, 1:2]
    asked = torch.cat([one, other, one + other, torch.zeros_like(one)], dim=1)
    of_one, of_other, of_sum, bias = linear(asked)[0].double()
    return _apart(of_sum + bias - of_one, of_other)


def _apart(found: Tensor, wanted: Tensor) -> float:
    """The difference, by the size of what was wanted."""
    difference = (found.double() - wanted.double()).pow(2).mean()
    return float((difference / wanted.double().pow(2).mean()).sqrt())


def _rows(width: int, model: PreTrainedModel) -> Tensor:
    """[1, n, width]: random rows of few digits, so that the sum of two has no rounding in any dtype."""
    drawn = torch.randn(1, max(COMPANY), width, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    return ((16 * drawn).round() / 16).to(model.device, model.dtype)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _kind(linear: nn.Module) -> tuple[Any, ...]:
    """All that a linear says of itself and of its weight: those that say the same compute in the same way."""
    weight = getattr(linear, "weight", None)
    return type(linear), type(weight), repr(linear), _said(linear), _said(weight)


def _said(thing: object) -> tuple[tuple[str, str], ...]:
    open_ = {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}
    return tuple((name, repr(value)) for name, value in open_.items() if not isinstance(value, Tensor | nn.Module))


def _called(linear: nn.Module) -> str:
    """Its class; of an ordinary linear that of its weight."""
    kind = type(linear.weight) if type(linear) is nn.Linear else type(linear)
    return f"{kind.__module__}.{kind.__qualname__}"
