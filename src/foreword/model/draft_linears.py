"""Linear layers used only for drafting: int8 on a GPU for up to 32 rows, otherwise full precision.

In: linears that read the same rows, or rows and a second input. Out: their outputs, concatenated. Int8 codes with one scale
per row are made at the first call, and made again in place by a call that finds the weights changed. If rows come through a
norm, its weight is folded into the codes, once for each norm. Decisions never depend on these layers. A captured round does
not look at the weights again: if they change, rounds must run eagerly until the codes are new (`GraphedLoop.forget`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.model.plain_linears import is_plain_linear
from foreword.ops.device import has_half_precision_kernels, is_capturing
from foreword.ops.dispatch import kernels

INT8_ROWS = 32  # with more rows, reading the weights no longer dominates
AT_ONCE = 4096  # rows of a weight that are rounded together: the intermediate results are several times as large

Codes = tuple[Tensor, Tensor, Tensor | None]  # [N, K] int8, [N, 1] scales, [N] bias
Versions = list[tuple[int, int]]


def int8_codes(weight: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round a weight [N, K], its columns multiplied by `factor` [K], to int8 codes [N, K] and one scale per row [N, 1]."""
    weight = weight.float() if factor is None else weight.float() * factor
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127  # a row of zeros stays one
    return (weight / scale).round().to(torch.int8).contiguous(), scale.contiguous()


class DraftLinears:
    """Linears of a drafter, as one product."""

    def __init__(self, *linears: nn.Module, second_from: int = 0) -> None:
        """second_from: the linears from this one on read the second input, those before it the rows alone. With 0, every
        linear reads both inputs, concatenated."""
        self.linears, self.second_from = linears, second_from
        # For each norm, or the first linear without one: the codes, and the versions of the weights they were made of.
        self._codes: WeakKeyDictionary[nn.Module, tuple[Codes, Versions]] = WeakKeyDictionary()

    def __call__(self, rows: Tensor, second: Tensor | None = None, norm: nn.RMSNorm | None = None) -> Tensor:
        """Apply all linears to rows [.., K], after a norm if there is one: [.., columns of all]. second [.., K]: the second
        input, without the norm."""
        if self._runs_int8(rows):
            return self._int8(rows, second, norm)
        rows = rows if norm is None else norm(rows)
        if second is not None and not self.second_from:
            rows = torch.cat([rows, second], dim=-1)
        found = [linear(self._input(place, rows, second)) for place, linear in enumerate(self.linears)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def onto(
        self, state: Tensor, rows: Tensor, second: Tensor | None = None, silu: bool = False, times: Tensor | None = None
    ) -> Tensor:
        """Add the product, or with `silu` its SiLU, to a state [.., N], and multiply all by `times` [.., 1]."""
        if self._runs_int8(rows):
            return self._int8(rows, second, None, silu, state, times)
        return added(state, self(rows, second), silu, times)

    def _input(self, place: int, rows: Tensor, second: Tensor | None) -> Tensor:
        return second if second is not None and 0 < self.second_from <= place else rows

    def _int8(self, rows: Tensor, second: Tensor | None, norm: nn.RMSNorm | None, *epilogue: Any) -> Tensor:
        module = kernels("drafting.int8_linear")
        columns = sum(linear.weight.shape[0] for linear in self.linears[: self.second_from] if isinstance(linear, nn.Linear))
        given = None if second is None else module.SecondInput(second, columns)
        parameters = norm_parameters(norm)
        epsilon = None if parameters is None else parameters[1]
        product: Callable[..., Tensor] = module.int8_linear
        return product(rows, *self.codes(norm), second=given, epsilon=epsilon, epilogue=module.Epilogue(*epilogue))

    def _runs_int8(self, rows: Tensor) -> bool:
        few = has_half_precision_kernels(rows.device, rows.dtype) and rows.numel() <= INT8_ROWS * rows.shape[-1]
        return few and not torch.is_grad_enabled() and all(map(is_plain_linear, self.linears))

    @torch.inference_mode(False)  # a tensor made in inference mode cannot be written to outside of it
    @torch.no_grad()  # the inner decorator, since the other turns gradients on
    def codes(self, norm: nn.RMSNorm | None = None) -> Codes:
        """Return the codes of all linears, stacked. Those of linears that read the rows include the weight of the norm."""
        linears = [linear for linear in self.linears if isinstance(linear, nn.Linear)]
        weights = [part for linear in linears for part in (linear.weight, linear.bias) if part is not None]
        current = [_version(weight) for weight in (*weights, *([] if norm is None else [norm.weight]))]
        key = self.linears[0] if norm is None else norm
        held, made_of = self._codes.get(key, (None, None))
        if held is None or made_of != current:
            assert not is_capturing(linears[0].weight.device), "weights changed: forget"
            held = _in_place(held, self._made(linears, norm))
            self._codes[key] = held, current
        return held

    def _made(self, linears: list[nn.Linear], norm: nn.RMSNorm | None) -> Codes:
        pieces = []
        for place, linear in enumerate(linears):
            factor = norm.weight.float() if norm is not None and (not self.second_from or place < self.second_from) else None
            pieces += [int8_codes(piece, factor) for piece in linear.weight.split(AT_ONCE)]
        codes, scales = (torch.cat(column) for column in zip(*pieces, strict=True))
        biases = [_bias(linear) for linear in linears] if any(one.bias is not None for one in linears) else None
        return codes, scales, None if biases is None else torch.cat(biases)


def norm_parameters(norm: nn.RMSNorm | None) -> tuple[Tensor, float] | None:
    """Return the weight and the epsilon of a norm, as kernels take them."""
    return None if norm is None else (norm.weight.detach(), norm.eps or 0.0)


def added(state: Tensor, product: Tensor, silu: bool, times: Tensor | None) -> Tensor:
    """Add a product, or its SiLU, to a state, and multiply the sum by `times`."""
    state = state + (functional.silu(product) if silu else product)
    return state if times is None else times * state


def _in_place(held: Codes | None, made: Codes) -> Codes:
    """Copy new codes over the held ones, so that captured rounds read them; if the shapes differ, return the new ones."""
    if held is None or _layouts(held) != _layouts(made):
        return made
    for old, new in zip(held, made, strict=True):
        if old is not None and new is not None:
            old.copy_(new)
    return held


def _layouts(codes: Codes) -> list[tuple[torch.Size, torch.dtype, torch.device] | None]:
    return [None if part is None else (part.shape, part.dtype, part.device) for part in codes]


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def _version(weight: Tensor) -> tuple[int, int]:
    """Return a value that changes when the weight is written to or replaced."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
