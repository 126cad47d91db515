"""Products that only guesses hang on. On a GPU their weights are read in eight bits, half as much as they are; elsewhere, in
training, and for many rows they are what they are. What is decided never depends on them.

In: linears that read the same rows, or rows and others beside them. Out: what they answer, side by side. Whole numbers of
eight bits with a scale a row are made at the first call, and again, where they lie, at one that finds the weights changed. A
norm's weight becomes part of them, for each norm that rows come through. A round is captured after it has run once: by then
they are there, and they stay there. It does not look at the weights again: whoever changes these has rounds run, not
replayed, until the codes are new (`GraphedLoop.forget`).
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

INT8_ROWS = 32  # beyond, reading the weights is no longer what takes long
AT_ONCE = 4096  # rows of a weight that are rounded together: on the way there they are several times as large

Codes = tuple[Tensor, Tensor, Tensor | None]  # [N, K] whole numbers, [N, 1] scales, [N] bias
Versions = list[tuple[int, int]]


def in_eight_bits(weight: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Whole numbers, and what each row of them is to be multiplied with. Columns are multiplied by a `factor` before."""
    weight = weight.float() if factor is None else weight.float() * factor
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127  # a row of zeros stays one
    return (weight / scale).round().to(torch.int8).contiguous(), scale.contiguous()


class DraftLinears:
    def __init__(self, *linears: nn.Module, turn: int = 0) -> None:
        """With `turn`, the linears from that one on read what lies beside the rows, and those before it the rows alone."""
        self.linears, self.turn = linears, turn
        self._codes: WeakKeyDictionary[nn.Module, tuple[Codes, Versions]] = WeakKeyDictionary()  # and what they are made of

    def __call__(self, rows: Tensor, beside: Tensor | None = None, norm: nn.RMSNorm | None = None) -> Tensor:
        """Rows [.., K], behind a norm if there is one, to [.., columns of all]. What lies `beside` them, [.., K] too, is
        part of the same rows to linears of 2 K columns; where there is a `turn`, those behind it read it."""
        if self._is_quick(rows):
            return self._quickly(rows, beside, norm)
        rows = rows if norm is None else norm(rows)
        if beside is not None and not self.turn:
            rows = torch.cat([rows, beside], dim=-1)
        found = [linear(self._read(place, rows, beside)) for place, linear in enumerate(self.linears)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def onto(
        self, state: Tensor, rows: Tensor, beside: Tensor | None = None, silu: bool = False, times: Tensor | None = None
    ) -> Tensor:
        """A state [.., N] with the product added, behind a SiLU where one is asked for, and all of it `times` [.., 1]."""
        if self._is_quick(rows):
            return self._quickly(rows, beside, None, silu, state, times)
        return added(state, self(rows, beside), silu, times)

    def _read(self, place: int, rows: Tensor, beside: Tensor | None) -> Tensor:
        return beside if beside is not None and 0 < self.turn <= place else rows

    def _quickly(self, rows: Tensor, beside: Tensor | None, norm: nn.RMSNorm | None, *behind: Any) -> Tensor:
        coarse = kernels("drafting.coarse")
        columns = sum(linear.weight.shape[0] for linear in self.linears[: self.turn] if isinstance(linear, nn.Linear))
        given = None if beside is None else coarse.Beside(beside, columns)
        of_norm = for_kernels(norm)
        epsilon = None if of_norm is None else of_norm[1]
        product: Callable[..., Tensor] = coarse.coarse_linear
        return product(rows, *self.codes(norm), beside=given, epsilon=epsilon, behind=coarse.Behind(*behind))

    def _is_quick(self, rows: Tensor) -> bool:
        few = has_half_precision_kernels(rows.device, rows.dtype) and rows.numel() <= INT8_ROWS * rows.shape[-1]
        return few and not torch.is_grad_enabled() and all(map(is_plain_linear, self.linears))

    @torch.inference_mode(False)  # what is born in inference mode cannot be written to outside of it
    @torch.no_grad()  # inside, since the other turns gradients on
    def codes(self, norm: nn.RMSNorm | None = None) -> Codes:
        """Of all linears on top of one another. Those that read the rows have the weight of the norm in them."""
        linears = [linear for linear in self.linears if isinstance(linear, nn.Linear)]
        parts = [part for linear in linears for part in (linear.weight, linear.bias) if part is not None]
        current = [_version(part) for part in (*parts, *([] if norm is None else [norm.weight]))]
        behind = self.linears[0] if norm is None else norm
        held, made_of = self._codes.get(behind, (None, None))
        if held is None or made_of != current:
            assert not is_capturing(linears[0].weight.device), "weights changed: forget"
            held = _in_place(held, self._made(linears, norm))
            self._codes[behind] = held, current
        return held

    def _made(self, linears: list[nn.Linear], norm: nn.RMSNorm | None) -> Codes:
        weights = []
        for place, linear in enumerate(linears):
            factor = norm.weight.float() if norm is not None and (not self.turn or place < self.turn) else None
            weights += [in_eight_bits(part, factor) for part in linear.weight.split(AT_ONCE)]
        whole, scale = (torch.cat(parts) for parts in zip(*weights, strict=True))
        biases = [_bias(linear) for linear in linears] if any(one.bias is not None for one in linears) else None
        return whole, scale, None if biases is None else torch.cat(biases)


def for_kernels(norm: nn.RMSNorm | None) -> tuple[Tensor, float] | None:
    """A norm as kernels take it: its weight and its epsilon."""
    return None if norm is None else (norm.weight.detach(), norm.eps or 0.0)


def added(state: Tensor, seen: Tensor, silu: bool, times: Tensor | None) -> Tensor:
    """What comes behind a product: a SiLU, the state that it joins, and a size for both."""
    state = state + (functional.silu(seen) if silu else seen)
    return state if times is None else times * state


def _in_place(held: Codes | None, made: Codes) -> Codes:
    """What was made, in the place of what was held: captured rounds go on reading there."""
    if held is None or _kinds(held) != _kinds(made):
        return made
    for old, new in zip(held, made, strict=True):
        if old is not None and new is not None:
            old.copy_(new)
    return held


def _kinds(codes: Codes) -> list[tuple[torch.Size, torch.dtype, torch.device] | None]:
    return [None if part is None else (part.shape, part.dtype, part.device) for part in codes]


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def _version(weight: Tensor) -> tuple[int, int]:
    """Another one once the weight is written to or replaced."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
