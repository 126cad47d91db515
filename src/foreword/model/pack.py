"""Faster linears on the CPU, for models that we loaded: weights in the block layout that oneDNN multiplies fastest.

A stock linear reads its weights well for one row and badly for several; a packed one keeps rows cheap, which is what
makes a tree of candidates worth checking. The numbers are in docs/performance.md. A packed layer cannot be trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# oneDNN picks the block layout for the number of rows it is told to expect; this one serves 1 to 64 rows well.
_ROWS_EXPECTED = 16


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_EXPECTED)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack(model: nn.Module) -> None:
    """Replace every linear of the model; an embedding tied to the head keeps its own weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
