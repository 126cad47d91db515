"""A fused decoder layer of a few kernels, for models that were fused for CUDA and for passes of few rows.

The rows of a draft cost almost nothing; reading the weights and launching kernels does. So a layer is four products and
attention. Each product includes the steps before and after it: norm, gate and residual (ops/layer/linear.py), rotation and
storing in the cache (ops/layer/qkv.py, or ops/layer/rotary.py if q and k have norms). A product that ends in the residual
stream hands on what the next norm needs, also to the next layer, which uses it only if it gets that same tensor: not if
rows were joined to it or a layer in between was skipped. With several ranks such a product is a part of a sum, after which
the norm comes; the first rank's part has the residual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from foreword.core.needs import HalfKind
from foreword.model.attention import LayerPass, SequenceKV, attend_by_kernel
from foreword.model.linears import FUSED, joint
from foreword.model.summed_linear import SummedLinear
from foreword.ops.dispatch import kernels

if TYPE_CHECKING:
    from foreword.ops.layer.linear import Prescaled

FEW_ROWS = 256
LARGE = 2**26  # weights of a layer; its products then take 30 microseconds or more
LARGE_ATTENTION = 2**24  # the same for its attention alone, which has about a quarter of them

Norm = tuple[Tensor, float]


class CudaAttention:
    """The attention half of a layer: all of a layer without an MLP. It reads the weights and changes nothing in them."""

    def __init__(self, layer: Any) -> None:
        products, self.norm_and_gate = kernels("layer.linear"), kernels("layer.norm_and_gate")
        self.few_rows_linear, self.linear_and_prescale = products.few_rows_linear, products.linear_and_prescale
        self.linear_rotate_and_store = kernels("layer.qkv").linear_rotate_and_store
        self.rotate_and_store = kernels("layer.rotary").rotate_and_store
        attention = layer.self_attn
        self.scaling: float = attention.scaling
        self.qkv: Any = joint(attention, FUSED[0])
        self.out: Any = attention.o_proj
        self.ranks = self.out.ranks if isinstance(self.out, SummedLinear) else None
        self.large = _count_weights(self.qkv, self.out) >= LARGE_ATTENTION
        self.width: int = attention.head_dim
        self.heads = self.out.weight.shape[1] // self.width
        self.before_attention = _norm(layer.input_layernorm)
        head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.q_norm, self.k_norm = (None if norm is None else _norm(norm) for norm in head_norms)
        self.prescaled: Prescaled | None = None  # the previous layer's output, prescaled for this layer's norm

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass, half: HalfKind | None) -> Tensor:
        """Run rows [b, n, H] through attention; their keys and values are stored in the view's cache."""
        assert half == "attention", "a layer without an MLP has no other half"
        if self._is_few(hidden):
            return self._onto(hidden, self._attended_by_our_product(hidden, positions, view), self.out)
        return hidden + self._linear(self._attended_by_torch_product(hidden, positions, view), self.out)

    def _onto(self, hidden: Tensor, rows: Tensor, product: Any) -> Tensor:
        """Return the residual stream plus a product of rows, by our product."""
        if self.ranks is None:
            return self.few_rows_linear(rows, *_weights(product), residual=hidden)
        residual = hidden if self.ranks.is_first else None
        return self.ranks.summed(self.few_rows_linear(rows, *_weights(product), residual=residual))

    def _linear(self, rows: Tensor, product: Any) -> Tensor:
        """Return a product of rows that goes into the residual stream, by torch's product."""
        part = linear(rows, *_weights(product))
        return part if self.ranks is None else self.ranks.summed(part)

    def _is_few(self, hidden: Tensor) -> bool:
        """Whether our products are the faster ones for rows [b, n, H]."""
        rows = hidden.shape[0] * hidden.shape[1]
        return rows == 1 or (rows <= FEW_ROWS and not self.large)

    def _attended_by_our_product(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor:
        """Return the output of attention [b, n, heads * width]."""
        return attend_by_kernel(self._query(hidden, positions, view), view, self.scaling).flatten(2)

    def _attended_by_torch_product(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor:
        query = self.rotate_and_store(self._qkv(hidden), *positions, *_destination(view), self.q_norm, self.k_norm)
        return attend_by_kernel(query, view, self.scaling).flatten(2)

    def _query(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor:
        """Return the queries [b, heads, n, width] of the rows, and store their keys and values in the cache."""
        weight, bias, norm = self.qkv.weight, self.qkv.bias, self.before_attention
        prescaled, self.prescaled = self.prescaled, None
        if self.q_norm is None and self.k_norm is None:
            return self.linear_rotate_and_store(
                hidden, weight, bias, norm, *positions, *_destination(view), prescaled=prescaled
            )
        qkv = self.few_rows_linear(hidden, weight, bias, norm=norm, prescaled=prescaled)
        return self.rotate_and_store(qkv, *positions, *_destination(view), self.q_norm, self.k_norm)

    def _qkv(self, hidden: Tensor) -> Tensor:
        """Return the joint q, k and v projection by torch's product: [b, n, columns of all three]."""
        normed = self.norm_and_gate.normed(hidden.flatten(0, 1), self.before_attention)
        return linear(normed, *_weights(self.qkv)).unflatten(0, hidden.shape[:2])


class CudaLayer(CudaAttention):
    """A whole layer."""

    def __init__(self, layer: Any, next_layer: CudaLayer | None) -> None:
        super().__init__(layer)
        self.gate_up: Any = joint(layer.mlp, FUSED[1])
        self.down: Any = layer.mlp.down_proj
        self.large = _count_weights(self.qkv, self.gate_up, self.out, self.down) >= LARGE
        self.before_mlp = _norm(layer.post_attention_layernorm)
        self.next_layer = next_layer

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass, half: HalfKind | None) -> Tensor:
        """Run rows [b, n, H] through the layer or one half of it; attention stores keys and values in the view's cache."""
        if half == "attention":
            return super().__call__(hidden, positions, view, half)
        if half == "mlp":
            return self._mlp(hidden)
        by_products = self._by_our_products if self._is_few(hidden) else self._by_torch_products
        return by_products(hidden, positions, view)

    def _mlp(self, hidden: Tensor) -> Tensor:
        """Run rows [b, n, H] through the MLP."""
        self.prescaled = None  # it was made for the norm before attention
        if self._is_few(hidden):
            gated = self.few_rows_linear(hidden, *_weights(self.gate_up), norm=self.before_mlp, gated=True)
            return self._onto(hidden, gated, self.down)
        normed = self.norm_and_gate.normed(hidden.flatten(0, 1), self.before_mlp)
        gated = self.norm_and_gate.gated(linear(normed, *_weights(self.gate_up)))
        return hidden + self._linear(gated, self.down).view(hidden.shape)

    def _by_our_products(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor:
        if self.ranks is not None:
            return self._mlp(self._onto(hidden, self._attended_by_our_product(hidden, positions, view), self.out))
        out, gate_up, down, norm = self.out, self.gate_up, self.down, self.before_mlp
        attended = self._attended_by_our_product(hidden, positions, view)
        hidden, prescaled = self.linear_and_prescale(attended, out.weight, out.bias, hidden, norm[0])
        gated = self.few_rows_linear(hidden, gate_up.weight, gate_up.bias, norm=norm, prescaled=prescaled, gated=True)
        if self.next_layer is None:
            return self.few_rows_linear(gated, down.weight, down.bias, residual=hidden)
        weight = self.next_layer.before_attention[0]
        hidden, self.next_layer.prescaled = self.linear_and_prescale(gated, down.weight, down.bias, hidden, weight)
        return hidden

    def _by_torch_products(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor:
        return self._after_attention(self._attended_by_torch_product(hidden, positions, view), hidden)

    def whole_sequences(self, hidden: Tensor, positions: tuple[Tensor, Tensor], kv_out: SequenceKV | None = None) -> Tensor:
        """Run whole sequences [b, n, H] from their first row on, without a cache and without gradients: how training reads
        them. `kv_out` gets their keys and values."""
        batch, rows, _ = hidden.shape
        qkv = self._qkv(hidden)
        keys, values = hidden.new_empty(2, batch, (qkv.shape[-1] // self.width - self.heads) // 2, rows, self.width)
        places = torch.arange(keys.numel() // self.width, device=hidden.device)
        query = self.rotate_and_store(qkv, *positions, keys, values, places, self.q_norm, self.k_norm)
        if kv_out is not None:
            kv_out.keys, kv_out.values = keys, values
        attended = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=self.scaling, enable_gqa=True)
        return self._after_attention(attended.transpose(1, 2).flatten(2), hidden)

    def _after_attention(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Compute the rest of the layer from the output of attention [b, n, heads * width], by torch's products."""
        attended, rows = attended.flatten(0, 1), hidden.flatten(0, 1).contiguous()
        rows, normed = self.norm_and_gate.added_and_normed(rows, self._linear(attended, self.out), self.before_mlp)
        gated = self.norm_and_gate.gated(linear(normed, *_weights(self.gate_up)))
        if self.ranks is not None:
            return (rows + self._linear(gated, self.down)).view(hidden.shape)
        rows.addmm_(gated, self.down.weight.t())  # in place: a new tensor that nothing else refers to
        return (rows if self.down.bias is None else rows + self.down.bias).view(hidden.shape)


def _destination(view: LayerPass) -> tuple[Tensor, Tensor, Tensor]:
    """Return where keys and values are stored."""
    assert view.cache is not None and view.places is not None
    return view.cache.keys, view.cache.values, view.places


def _count_weights(*products: Any) -> int:
    return sum(product.weight.numel() for product in products)


def _weights(product: Any) -> tuple[Tensor, Tensor | None]:
    return product.weight, product.bias


def _norm(norm: Any) -> Norm:
    return norm.weight.detach(), norm.variance_epsilon
