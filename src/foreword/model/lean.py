"""A decoder layer in as few calls as it takes, for models that were packed for the CPU.

A small model's pass spends a third of its time between the products. This runs the same layer on the same weights as four
products, one attention and four compiled loops (kernels/between.py). It covers pre-norm layers with rotary positions, with
or without windows, biases, and norms on q and k: the families that families.py calls lean, and of these what `_is_known`
knows. Any other layer runs as transformers wrote it, and so does every layer without Numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from foreword.core.state import Lanes
from foreword.model.attention import Pass
from foreword.model.cache import look
from foreword.model.pack import FusedNorm, FusedPart, PackedLinear

_NO_NORM = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class LeanRows:
    """What all lean layers want to know of a pass: how its rows turn, where they are stored, how far they look."""

    cosine: np.ndarray  # [b * n, width]
    sine: np.ndarray
    places: np.ndarray  # [b * heads * n]
    lanes: Lanes
    reach: int

    @staticmethod
    def of(positions: tuple[Tensor, Tensor], shared: Pass) -> LeanRows:
        assert shared.lanes is not None and shared.places is not None
        cosine, sine = (part.flatten(0, 1).numpy() for part in positions)
        return LeanRows(cosine, sine, shared.places.numpy(), shared.lanes, shared.reach)


class LeanLayer:
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

    def __call__(self, hidden: Tensor, rows: LeanRows, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rows [b, n, H] through the layer; `mask` is that of its window, `keys` and `values` are its own cache."""
        flat = hidden.flatten(0, 1)
        ready = torch.empty_like(flat)
        self.between.normed(flat.numpy(), *self.before_attention, ready.numpy())
        mixed = self._attend(self.qkv(ready), rows, mask, keys, values, hidden.shape[0])
        own = self.out(mixed)
        self.between.added_and_normed(own.numpy(), flat.numpy(), *self.before_mlp, ready.numpy())
        both = self.gate_up(ready)
        gated = both.new_empty(both.shape[0], both.shape[1] // 2)
        self.between.gated(both.numpy(), gated.numpy())
        return self.down(gated).add_(own).view(hidden.shape)

    def _attend(self, qkv: Tensor, rows: LeanRows, mask: Tensor, keys: Tensor, values: Tensor, batch: int) -> Tensor:
        heads, count = keys.shape[1], qkv.shape[0] // batch
        query = qkv.new_empty(batch, heads, self.q_size // self.width // heads * count, self.width)
        self.between.turned_and_stored(
            qkv.numpy(), rows.cosine, rows.sine, self.q_norm, self.k_norm, self.head_epsilon, rows.places,
            keys.view(-1, self.width).numpy(), values.view(-1, self.width).numpy(), query.numpy(),
        )  # fmt: skip
        seen = look(keys, rows.lanes, rows.reach), look(values, rows.lanes, rows.reach)
        mixed = scaled_dot_product_attention(query, *seen, attn_mask=mask, scale=self.scaling)
        return mixed.view(batch, -1, count, self.width).transpose(1, 2).reshape(-1, self.q_size)


def lean_layers(layers: nn.ModuleList) -> list[LeanLayer] | None:
    """The layers as lean ones, or None where they are not packed layers of the kind that this file knows."""
    if not all(map(_is_known, layers)) or find_spec("numba") is None:
        return None
    return [LeanLayer(layer) for layer in layers]


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


def _norm(norm: Any) -> tuple[np.ndarray, float]:
    return (_NO_NORM, 0.0) if norm is None else (norm.weight.detach().numpy(), norm.epsilon)
