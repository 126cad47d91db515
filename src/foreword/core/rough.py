"""Products that only guesses hang on. On a GPU their weights are read in eight bits, half as much as they are; elsewhere, in
training, and for many rows they are what they are. What is decided never depends on them.

In: linears that read the same rows. Out: what they answer, side by side. Whole numbers of eight bits with a scale a row are
made at the first call, and again where the weights have changed since. A round is captured after it has run once: by then
they are there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROUGH_ROWS = 32  # beyond, reading the weights is no longer what takes long
HALF = (torch.bfloat16, torch.float16)

Codes = tuple[Tensor, Tensor, Tensor | None]  # [N, K] whole numbers, [N, 1] scales, [N] bias


def in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers, and what each row of them is to be multiplied with."""
    weight = weight.float()
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127  # a row of zeros stays one
    return (weight / scale).round().to(torch.int8).contiguous(), scale.contiguous()


class Rough:
    def __init__(self, *linears: nn.Module) -> None:
        self.linears = linears
        self._codes: Codes | None = None
        self._of: list[tuple[int, int]] = []  # which weights these are the codes of

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows [.., K] to [.., columns of all]."""
        if self._is_quick(rows):
            from foreword.kernels.coarse import coarse_linear  # noqa: PLC0415  Triton is there only where CUDA is

            return coarse_linear(rows, *self.codes())
        found = [linear(rows) for linear in self.linears]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _is_quick(self, rows: Tensor) -> bool:
        few = rows.is_cuda and rows.dtype in HALF and rows.numel() <= ROUGH_ROWS * rows.shape[-1]
        return few and not torch.is_grad_enabled() and all(type(linear) is nn.Linear for linear in self.linears)

    @torch.no_grad()
    def codes(self) -> Codes:
        """Of all linears on top of one another."""
        linears = [linear for linear in self.linears if isinstance(linear, nn.Linear)]
        current = [_version(part) for linear in linears for part in (linear.weight, linear.bias) if part is not None]
        if self._codes is None or self._of != current:
            weights = [in_eight_bits(linear.weight) for linear in linears]
            whole, scale = (torch.cat(parts) for parts in zip(*weights, strict=True))
            biases = [_bias(linear) for linear in linears] if any(one.bias is not None for one in linears) else None
            self._codes, self._of = (whole, scale, None if biases is None else torch.cat(biases)), current
        return self._codes


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def _version(weight: Tensor) -> tuple[int, int]:
    """Another one once the weight is written to or replaced."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
