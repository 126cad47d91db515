"""A decoder layer as six kernels of ours, for models that were fused for CUDA: what a pass of few rows needs, and no more.

The rows of a draft cost next to nothing; what costs is reading the weights, and starting kernels. So the norm before a
product, the gate and the residual behind it are part of the product (kernels/linear.py), rotation and storing are one
kernel (kernels/rotary.py), and attention is ours anyway. A pass of many rows, such as a prompt's, is bound by arithmetic
and goes through torch's own products.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from foreword.model.attention import Pass, attend_by_kernel

FEW_ROWS = 128

Norm = tuple[Tensor, float]


class CudaLayer:
    """Reads the weights of a fused layer; the layer itself stays as it is."""

    def __init__(self, layer: Any) -> None:
        from foreword.kernels.linear import few_rows_linear  # noqa: PLC0415  Triton is there only where CUDA is
        from foreword.kernels.rotary import turn_and_store  # noqa: PLC0415

        self.few_rows_linear, self.turn_and_store = few_rows_linear, turn_and_store
        attention, mlp = layer.self_attn, layer.mlp
        self.scaling: float = attention.scaling
        self.qkv, self.out = attention.q_proj.fusion.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fusion.linear, mlp.down_proj
        self.before_attention, self.before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = (_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """Rows [b, n, H] through the layer; keys and values of the rows land in the view's cache."""
        assert view.keys is not None and view.values is not None and view.places is not None
        product = self.few_rows_linear if hidden.shape[0] * hidden.shape[1] <= FEW_ROWS else many_rows_linear
        qkv = product(hidden, self.qkv.weight, self.qkv.bias, norm=self.before_attention)
        query = self.turn_and_store(qkv, *positions, view.keys, view.values, view.places, self.q_norm, self.k_norm)
        mixed = attend_by_kernel(query, view, self.scaling).flatten(2)
        hidden = product(mixed, self.out.weight, self.out.bias, residual=hidden)
        gated = product(hidden, self.gate_up.weight, self.gate_up.bias, norm=self.before_mlp, gated=True)
        return product(gated, self.down.weight, self.down.bias, residual=hidden)


def many_rows_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """What `few_rows_linear` computes, as torch operations."""
    rows = rows if norm is None else rms_norm(rows, norm[0].shape, *norm)
    out = linear(rows, weight, bias)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = silu(gate) * up
    return out if residual is None else out + residual


def _norm(norm: Any) -> Norm | None:
    return None if norm is None else (norm.weight.detach(), norm.variance_epsilon)
