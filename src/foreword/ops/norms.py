"""RMSNorm of rows as one operation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.device import has_half_precision_kernels
from foreword.ops.dispatch import accelerated


def _has_kernel(rows: Tensor, weight: Tensor, epsilon: float) -> bool:
    """Return whether the kernel can run: it has no gradients, and cannot launch for zero rows."""
    return has_half_precision_kernels(rows.device, rows.dtype) and rows.numel() > 0 and not torch.is_grad_enabled()


@accelerated("layer.norm_and_gate:rms_normed", when=_has_kernel)
def rms_normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise rows [.., K] to a root mean square of 1, and multiply them by `weight` [K]."""
    return functional.rms_norm(rows, weight.shape, weight, epsilon)
