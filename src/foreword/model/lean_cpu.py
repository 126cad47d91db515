"""A decoder layer in as few calls as it takes, for models that were packed for the CPU.

A small model's pass spends a third of its time between the products. This runs the same layer on the same weights as four
products, one attention and four compiled loops (kernels/between.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.model.attention import Pass
from foreword.model.cache import look

_NO_NORM = np.empty(0, dtype=np.float32)


class CpuLayer:
    """Reads the weights of a packed layer; the layer itself stays as it is."""

    def __init__(self, layer: Any) -> None:
        from foreword.model.kernels import between  # noqa: PLC0415  Numba is optional

        self.between = between
        attention, mlp = layer.self_attn, layer.mlp
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.qkv, self.out = attention.q_proj.fusion.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fusion.linear, mlp.down_proj
        self.before_attention, self.before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm, self.head_epsilon = _norm(getattr(attention, "q_norm", None))
        self.k_norm, _ = _norm(getattr(attention, "k_norm", None))
        self.q_size: int = attention.q_proj.columns.stop

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """Rows [b, n, H] through the layer; keys and values of the rows land in the view's cache."""
        flat = hidden.flatten(0, 1)
        ready = torch.empty_like(flat)
        self.between.normed(flat.numpy(), *self.before_attention, ready.numpy())
        mixed = self._attend(self.qkv(ready), positions, view)
        own = self.out(mixed)
        self.between.added_and_normed(own.numpy(), flat.numpy(), *self.before_mlp, ready.numpy())
        both = self.gate_up(ready)
        gated = both.new_empty(both.shape[0], both.shape[1] // 2)
        self.between.gated(both.numpy(), gated.numpy())
        return self.down(gated).add_(own).view(hidden.shape)

    def _attend(self, qkv: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        keys, values, places, lanes = view.keys, view.values, view.places, view.lanes
        assert keys is not None and values is not None and places is not None and lanes is not None
        cosine, sine = (part.flatten(0, 1) for part in positions)
        batch, heads = lanes.slots.shape[0], keys.shape[1]
        count = qkv.shape[0] // batch
        query = qkv.new_empty(batch, heads, self.q_size // self.width // heads * count, self.width)
        self.between.turned_and_stored(
            qkv.numpy(), cosine.numpy(), sine.numpy(), self.q_norm, self.k_norm, self.head_epsilon, places.numpy(),
            keys.view(-1, self.width).numpy(), values.view(-1, self.width).numpy(), query.numpy(),
        )  # fmt: skip
        seen = look(keys, lanes, view.reach), look(values, lanes, view.reach)
        mixed = scaled_dot_product_attention(query, *seen, attn_mask=view.mask, scale=self.scaling)
        return mixed.view(batch, -1, count, self.width).transpose(1, 2).reshape(-1, self.q_size)


def _norm(norm: Any) -> tuple[np.ndarray, float]:
    return (_NO_NORM, 0.0) if norm is None else (norm.weight.detach().numpy(), norm.variance_epsilon)
