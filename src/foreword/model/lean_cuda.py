"""A decoder layer as a few kernels of ours, for models that were fused for CUDA: what a pass of few rows needs, and no more.

The rows of a draft cost next to nothing; what costs is reading the weights, and starting kernels. So a layer is four
products and attention, and what lies before and behind a product is part of it: norm, gate and residual (kernels/linear.py),
rotation and the way into the cache (kernels/qkv.py; heads with norms of their own have a kernel for it, kernels/rotary.py).
A pass of many rows, such as a prompt's, is bound by arithmetic and goes through torch's own products.
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
        from foreword.kernels.qkv import linear_turn_and_store  # noqa: PLC0415
        from foreword.kernels.rotary import turn_and_store  # noqa: PLC0415

        self.few_rows_linear, self.turn_and_store = few_rows_linear, turn_and_store
        self.linear_turn_and_store = linear_turn_and_store
        attention, mlp = layer.self_attn, layer.mlp
        self.scaling: float = attention.scaling
        self.qkv, self.out = attention.q_proj.fusion.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fusion.linear, mlp.down_proj
        self.before_attention, self.before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = (_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """Rows [b, n, H] through the layer; keys and values of the rows land in the view's cache."""
        few = hidden.shape[0] * hidden.shape[1] <= FEW_ROWS
        product = self.few_rows_linear if few else many_rows_linear
        query = self._query(hidden, positions, view, few)
        mixed = attend_by_kernel(query, view, self.scaling).flatten(2)
        hidden = product(mixed, self.out.weight, self.out.bias, residual=hidden)
        gated = product(hidden, self.gate_up.weight, self.gate_up.bias, norm=self.before_mlp, gated=True)
        return product(gated, self.down.weight, self.down.bias, residual=hidden)

    def _query(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass, few: bool) -> Tensor:
        """Queries [b, heads, n, width] of the rows; their keys and values go to the cache."""
        assert view.keys is not None and view.values is not None and view.places is not None
        weight, bias, norm = self.qkv.weight, self.qkv.bias, self.before_attention
        goal = view.keys, view.values, view.places
        if few and self.q_norm is None and self.k_norm is None:
            return self.linear_turn_and_store(hidden, weight, bias, norm, *positions, *goal)
        product = self.few_rows_linear if few else many_rows_linear
        return self.turn_and_store(product(hidden, weight, bias, norm=norm), *positions, *goal, self.q_norm, self.k_norm)


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
