"""A decoder layer in as few operations as it takes, for models that were packed for the CPU.

A small model's pass spends a third of its time between the products: sixty small operations a layer, called one by one
through several Python modules. This runs the same layer on the same weights in about twenty: q and k are turned together,
rows go to the cache as they come out of the product, and nothing is copied to be looked at. It covers pre-norm layers
with rotary positions, with or without windows, biases, and norms on q and k: the families that families.py calls lean, and
of these what `_is_known` knows. Any other layer runs as transformers wrote it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from foreword.model.attention import Pass
from foreword.model.cache import SlotCache, look, store
from foreword.model.pack import FusedNorm, FusedPart, PackedLinear


class LeanLayer:
    """Reads the weights of a packed layer; the layer itself stays as it is."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.qkv, self.out = attention.q_proj.fusion.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fusion.linear, mlp.down_proj
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.q_size: int = attention.q_proj.columns.stop
        self.k_size: int = attention.k_proj.columns.stop - self.q_size

    def __call__(self, hidden: Tensor, turn: tuple[Tensor, Tensor], view: Pass, places: Tensor) -> Tensor:
        """Rows [b, n, H] through the layer. `turn` are cosines and signed sines, `places` those of (b, n, head)."""
        query = self._attend(self.qkv(_normed(self.before_attention, hidden)), turn, view, places)
        hidden = self.out(query).add_(hidden)
        gate, up = self.gate_up(_normed(self.before_mlp, hidden)).chunk(2, dim=-1)
        return self.down(silu(gate).mul_(up)).add_(hidden)

    def _attend(self, qkv: Tensor, turn: tuple[Tensor, Tensor], view: Pass, places: Tensor) -> Tensor:
        batch, rows, _ = qkv.shape
        both = qkv[..., : self.q_size + self.k_size].view(batch, rows, -1, self.width)
        heads = self.q_size // self.width
        if self.q_norm is not None:
            both = torch.cat([_normed(self.q_norm, both[:, :, :heads]), _normed(self.k_norm, both[:, :, heads:])], dim=2)
        turned = torch.addcmul(both * turn[0], both.roll(self.width // 2, dims=-1), turn[1])
        assert view.keys is not None and view.values is not None and view.lanes is not None
        store(view.keys, places, turned[:, :, heads:])
        store(view.values, places, qkv[..., self.q_size + self.k_size :])
        keys, values = look(view.keys, view.lanes, view.reach), look(view.values, view.lanes, view.reach)
        query = turned[:, :, :heads].transpose(1, 2).reshape(batch, keys.shape[1], -1, self.width)
        mixed = scaled_dot_product_attention(query, keys, values, attn_mask=view.mask, scale=self.scaling)
        return mixed.view(batch, heads, rows, self.width).transpose(1, 2).reshape(batch, rows, self.q_size)


def lean_layers(layers: nn.ModuleList) -> list[LeanLayer] | None:
    """The layers as lean ones, or None where they are not packed layers of the kind that this file knows."""
    return [LeanLayer(layer) for layer in layers] if all(map(_is_known, layers)) else None


def _is_known(layer: Any) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    fused = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    fused += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj")]
    single = [getattr(attention, "o_proj", None), getattr(mlp, "down_proj", None)]
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    inner = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return (
        all(isinstance(part, FusedPart) for part in fused)
        and all(isinstance(part, PackedLinear) for part in single)
        and all(isinstance(norm, FusedNorm) for norm in norms)
        and (inner == [None, None] or all(_is_per_head(norm, attention) for norm in inner))
        and type(getattr(mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    )


def _is_per_head(norm: Any, attention: Any) -> bool:
    return isinstance(norm, FusedNorm) and norm.weight.shape == (attention.head_dim,)


def turns(cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """For all heads of a row: the cosines, and the sines with the sign that swapping the halves gives them."""
    half = sine.shape[-1] // 2
    signed = torch.cat([-sine[..., :half], sine[..., half:]], dim=-1)
    return cosine.unsqueeze(2), signed.unsqueeze(2)


def places_by_row(cache: SlotCache, places: Tensor, batch: int) -> Tensor:
    """Flat places of (slot, head, row), in the order (slot, row, head) in which a product gives its rows."""
    return places.view(batch, cache.shape.heads, -1).transpose(1, 2).flatten()


def _normed(norm: Any, rows: Tensor) -> Tensor:
    return rms_norm(rows, norm.weight.shape, norm.weight, norm.epsilon)
