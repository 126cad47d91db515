"""A decoder layer as a few kernels of ours, for models that were fused for CUDA: what a pass of few rows needs, and no more.

The rows of a draft cost next to nothing; what costs is reading the weights, and starting kernels. So a layer is four
products and attention, and what lies before and behind a product is part of it: norm, gate and residual
(ops/layer/linear.py), rotation and the way into the cache (ops/layer/qkv.py; heads with norms of their own have a kernel
for it, ops/layer/rotary.py). A product that ends in the residual stream hands on what the next norm needs, from layer to
layer too: it is used if the next layer is given that very tensor, and not where rows were joined to it or a layer in
between was left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from foreword.model.attention import Held, Pass, attend_by_kernel
from foreword.model.linears import FUSED, joint
from foreword.ops.dispatch import kernels

if TYPE_CHECKING:
    from foreword.ops.layer.linear import Handed

FEW_ROWS = 256
LARGE = 2**26  # numbers in a layer's weights; its products then take 30 microseconds and more

Norm = tuple[Tensor, float]


class CudaLayer:
    """Reads the weights of a fused layer; the layer itself stays as it is."""

    def __init__(self, layer: Any, after: CudaLayer | None) -> None:
        """`after` is the layer that comes next."""
        products, self.glue = kernels("layer.linear"), kernels("layer.glue")
        self.few_rows_linear, self.linear_and_hand_on = products.few_rows_linear, products.linear_and_hand_on
        self.linear_turn_and_store = kernels("layer.qkv").linear_turn_and_store
        self.turn_and_store = kernels("layer.rotary").turn_and_store
        attention, mlp = layer.self_attn, layer.mlp
        self.scaling: float = attention.scaling
        self.qkv: Any = joint(attention, FUSED[0])
        self.gate_up: Any = joint(mlp, FUSED[1])
        self.out, self.down = attention.o_proj, mlp.down_proj
        linears: tuple[Any, ...] = self.qkv, self.gate_up, self.out, self.down
        self.large = sum(linear.weight.numel() for linear in linears) >= LARGE
        self.width: int = attention.head_dim
        self.heads = self.out.weight.shape[1] // self.width
        self.before_attention, self.before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        own = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.q_norm, self.k_norm = (None if norm is None else _norm(norm) for norm in own)
        self.after = after
        self.handed: Handed | None = None  # what the layer before left for this one

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """Rows [b, n, H] through the layer; keys and values of the rows land in the view's cache."""
        rows = hidden.shape[0] * hidden.shape[1]
        by_us = rows == 1 or (rows <= FEW_ROWS and not self.large)
        return (self._by_us if by_us else self._by_library)(hidden, positions, view)

    def _by_us(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        out, gate_up, down, norm = self.out, self.gate_up, self.down, self.before_mlp
        handed, self.handed = self.handed, None
        mixed = attend_by_kernel(self._query(hidden, handed, positions, view), view, self.scaling).flatten(2)
        hidden, handed = self.linear_and_hand_on(mixed, out.weight, out.bias, hidden, norm[0])
        gated = self.few_rows_linear(hidden, gate_up.weight, gate_up.bias, norm=norm, handed=handed, gated=True)
        if self.after is None:
            return self.few_rows_linear(gated, down.weight, down.bias, residual=hidden)
        weight = self.after.before_attention[0]
        hidden, self.after.handed = self.linear_and_hand_on(gated, down.weight, down.bias, hidden, weight)
        return hidden

    def _query(self, hidden: Tensor, handed: Handed | None, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """Queries [b, heads, n, width] of the rows; their keys and values go to the cache."""
        weight, bias, norm = self.qkv.weight, self.qkv.bias, self.before_attention
        if self.q_norm is None and self.k_norm is None:
            return self.linear_turn_and_store(hidden, weight, bias, norm, *positions, *_goal(view), handed=handed)
        qkv = self.few_rows_linear(hidden, weight, bias, norm=norm, handed=handed)
        return self.turn_and_store(qkv, *positions, *_goal(view), self.q_norm, self.k_norm)

    def _by_library(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        query = self.turn_and_store(self._qkv(hidden), *positions, *_goal(view), self.q_norm, self.k_norm)
        return self._behind_attention(attend_by_kernel(query, view, self.scaling), hidden)

    def whole(self, hidden: Tensor, positions: tuple[Tensor, Tensor], held: Held | None = None) -> Tensor:
        """Whole texts [b, n, H] from their first row on, without a cache: as training reads them. Knows no gradients. `held`
        gets keys and values."""
        batch, rows, _ = hidden.shape
        qkv = self._qkv(hidden)
        keys, values = hidden.new_empty(2, batch, (qkv.shape[-1] // self.width - self.heads) // 2, rows, self.width)
        places = torch.arange(keys.numel() // self.width, device=hidden.device)
        query = self.turn_and_store(qkv, *positions, keys, values, places, self.q_norm, self.k_norm)
        if held is not None:
            held.keys, held.values = keys, values
        mixed = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=self.scaling, enable_gqa=True)
        return self._behind_attention(mixed.transpose(1, 2), hidden)

    def _qkv(self, hidden: Tensor) -> Tensor:
        """What queries, keys and values are made of, by torch's product: [b, n, all of them]."""
        ready = self.glue.normed(hidden.flatten(0, 1), self.before_attention)
        return linear(ready, *_weights(self.qkv)).unflatten(0, hidden.shape[:2])

    def _behind_attention(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """From what attention gave [b, n, heads, width] to the layer's end, by torch's products."""
        mixed, rows = mixed.flatten(0, 1).flatten(1), hidden.flatten(0, 1).contiguous()
        rows, ready = self.glue.added_and_normed(rows, linear(mixed, *_weights(self.out)), self.before_mlp)
        gated = self.glue.gated(linear(ready, *_weights(self.gate_up)))
        rows.addmm_(gated, self.down.weight.t())  # rows that nobody else has seen
        return (rows if self.down.bias is None else rows + self.down.bias).view(hidden.shape)


def _goal(view: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """Where keys and values go."""
    assert view.cached is not None and view.places is not None
    return view.cached.keys, view.cached.values, view.places


def _weights(product: Any) -> tuple[Tensor, Tensor | None]:
    return product.weight, product.bias


def _norm(norm: Any) -> Norm:
    return norm.weight.detach(), norm.variance_epsilon
