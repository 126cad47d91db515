"""A decoder layer in as few calls as it takes, for models that were packed for the CPU.

A small model's pass spends a third of its time between the products, and most of that on calling: behind a product that has
swept the caches, every call into torch waits for its own code. So a layer is four products, one attention and five compiled
loops (kernels/between.py), on buffers that all layers use in turn. What a layer gives back is its own: taps may keep it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.model.attention import Pass
from foreword.model.cache import look
from foreword.model.pack import Buffer

KEPT_ROWS = 64  # passes of more rows are prompts, of any length, and bound by arithmetic: their buffers are made anew
_NO_NORM = np.empty(0, dtype=np.float32)


class Workspace:
    """Buffers for passes of one shape."""

    def __init__(self, layer: CpuLayer, batch: int, count: int, heads: int) -> None:
        rows, width = batch * count, layer.width
        self.ready = Buffer.of(rows, layer.qkv.columns_in)
        self.qkv = Buffer.of(rows, layer.qkv.columns_out)
        self.query = Buffer.of(batch, heads, layer.q_size // width // heads * count, width)
        self.own = Buffer.of(rows, layer.out.columns_out)
        self.both = Buffer.of(rows, layer.gate_up.columns_out)
        self.gated = Buffer.of(rows, layer.down.columns_in)


class Looked(NamedTuple):
    """What a layer looks at in its cache, made once for as long as it looks there."""

    key: tuple[Tensor, tuple[int, ...], int]
    keys: Tensor
    values: Tensor


class CpuLayer:
    """Reads the weights of a packed layer; the layer itself stays as it is."""

    def __init__(self, layer: Any, spaces: dict[tuple[int, int], Workspace]) -> None:
        """`spaces` are those of all layers of a stack."""
        from foreword.model.kernels import between  # noqa: PLC0415  Numba is optional

        self.between, self.spaces = between, spaces
        attention, mlp = layer.self_attn, layer.mlp
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.qkv, self.out = attention.q_proj.fusion.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fusion.linear, mlp.down_proj
        self.before_attention, self.before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm, self.head_epsilon = _norm(getattr(attention, "q_norm", None))
        self.k_norm, _ = _norm(getattr(attention, "k_norm", None))
        self.q_size: int = attention.q_proj.columns.stop
        self.looked: Looked | None = None

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """Rows [b, n, H] through the layer; keys and values of the rows land in the view's cache."""
        batch, count, size = hidden.shape
        assert view.keys is not None
        space = self.spaces.get((batch, count)) or Workspace(self, batch, count, view.keys.shape[1])
        if batch * count <= KEPT_ROWS:
            self.spaces[batch, count] = space
        rows = hidden.reshape(-1, size).numpy()
        self.between.normed(rows, *self.before_attention, space.ready.array)
        own = self.out.into(self._attend(space, positions, view), space.own)
        self.between.added_and_normed(own, rows, *self.before_mlp, space.ready.array)
        self.between.gated(self.gate_up.into(space.ready.tensor, space.both), space.gated.array)
        result = self.down(space.gated.tensor)
        self.between.added(result.numpy(), own)
        return result.view(batch, count, size)

    def _attend(self, space: Workspace, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """[b * n, heads * width]: the values that each row's heads mix."""
        keys, values, places = view.keys, view.values, view.places
        assert keys is not None and values is not None and places is not None
        cosine, sine = (part.flatten(0, 1).numpy() for part in positions)
        self.between.turned_and_stored(
            self.qkv.into(space.ready.tensor, space.qkv), cosine, sine, self.q_norm, self.k_norm, self.head_epsilon,
            places.numpy(), keys.view(-1, self.width).numpy(), values.view(-1, self.width).numpy(), space.query.array,
        )  # fmt: skip
        seen = self._look(view)
        mixed = scaled_dot_product_attention(space.query.tensor, *seen, attn_mask=view.mask, scale=self.scaling)
        batch, heads, grouped, _ = mixed.shape
        count = grouped * heads * self.width // self.q_size
        if count > 1:
            mixed = mixed.view(batch, -1, count, self.width).transpose(1, 2)
        return mixed.reshape(batch * count, self.q_size)

    def _look(self, view: Pass) -> tuple[Tensor, Tensor]:
        assert view.keys is not None and view.values is not None and view.lanes is not None
        if view.lanes.run is None:  # copied, so never the same again
            return look(view.keys, view.lanes, view.reach), look(view.values, view.lanes, view.reach)
        key = view.keys, view.lanes.ids, view.reach
        if self.looked is None or self.looked.key[0] is not key[0] or self.looked.key[1:] != key[1:]:
            self.looked = Looked(key, look(view.keys, view.lanes, view.reach), look(view.values, view.lanes, view.reach))
        return self.looked.keys, self.looked.values


def _norm(norm: Any) -> tuple[np.ndarray, float]:
    return (_NO_NORM, 0.0) if norm is None else (norm.weight.detach().numpy(), norm.variance_epsilon)
