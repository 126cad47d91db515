"""RMSNorm of rows as one operation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.device import has_half_precision_kernels
from foreword.ops.dispatch import accelerated


def _has_kernel(rows: Tensor, weight: Tensor, epsilon: float) -> bool:
    """The kernel has no gradients, and no launch of zero programs."""
    return has_half_precision_kernels(rows.device, rows.dtype) and rows.numel() > 0 and not torch.is_grad_enabled()


@accelerated("layer.glue:rms_normed", when=_has_kernel)
def rms_normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Rows [.., K] at a root mean square of 1, times `weight` [K]."""
    return functional.rms_norm(rows, weight.shape, weight, epsilon)
